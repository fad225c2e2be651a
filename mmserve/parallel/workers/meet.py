"""How the ranks of an engine find each other: a store at the driver, and two groups for each rank."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mmserve.parallel.group import Group, make_group
from mmserve.parallel.layout import Place

__all__ = ["Groups", "host_store", "join_store", "meet"]


@dataclass(frozen=True, slots=True)
class Groups:
    """A rank's two: those that share its layers, and its column's, one a stage."""

    tensor: Group
    pipeline: Group


def host_store(host: str, timeout: float) -> Any:
    """A new store on a free port of this machine; lives as long as the object does."""
    return dist.TCPStore(host, 0, None, True, timedelta(seconds=timeout), wait_for_workers=False)


def join_store(host: str, port: int, timeout: float) -> Any:
    """The store that is there already."""
    return dist.TCPStore(host, port, None, False, timedelta(seconds=timeout), wait_for_workers=False)


def meet(store: Any, name: str, place: Place, device: torch.device, host: str, timeout: float) -> Groups:
    """Connect to the ranks of one's row and column; all ranks call it.

    Args:
        store: Shared by all.
        name: The engine's, unique in the store.
        place: This rank's.
        device: Where tensors are. host: Of the store. timeout: Seconds until silence is an error.

    Raises:
        RuntimeError: A rank did not come, or died.
    """
    layout = place.layout
    none = Group(None, 0, 1)
    tensor, pipeline = none, none
    if layout.tensor > 1:
        row = f"{name}/tensor/{place.stage}"
        tensor = make_group(store, row, place.tensor_rank, layout.tensor, device, host, timeout)
        if device.type == "cpu":
            tensor.share_memory(timeout)
    if layout.pipeline > 1:
        column = f"{name}/pipeline/{place.tensor_rank}"
        pipeline = make_group(store, column, place.stage, layout.pipeline, device, host, timeout)
    return Groups(tensor, pipeline)
