"""Reads from a checkpoint what is one rank's, and no more.

transformers' loader asks each tensor of the checkpoint for its values, once, and renames and merges what it gets. Here
it is given tensors that answer with this rank's slice. Which slice that is follows from the parameter that the tensor
ends in, so the loader's own renames are asked for that. Where a merge does not commute with cutting (a transposition,
tensors of other shapes joined), the parameter is read whole, and `finish` cuts it afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mmserve.parallel.shares import Share

__all__ = ["Reader", "finish"]

_COMMUTING = ("MergeModulelist", "Concatenate")
"""Merges that cutting commutes with: lists of experts stacked, gates and ups joined."""


@dataclass(frozen=True, slots=True)
class _Target:
    """Where a tensor of the checkpoint ends up: a parameter, and the merge on the way, if any."""

    name: str
    converter: Any | None


class _Sliced:
    """A tensor of a safetensors file that reads one rank's share of itself; as much of its interface as is used."""

    def __init__(self, whole: Any, share: Share) -> None:
        self._whole = whole
        self._share = share

    def get_shape(self) -> list[int]:
        return list(self._share.shape(self._whole.get_shape()))

    def get_dtype(self) -> str:
        return str(self._whole.get_dtype())

    def __getitem__(self, key: object) -> torch.Tensor:
        if key is not Ellipsis:
            raise TypeError("a slice of a tensor is read whole")
        indices = self._share.indices(len(self._whole.get_shape()))
        parts = [self._whole[index] for index in indices]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self._share.dim)


class Reader:
    """The way from a checkpoint's tensors to a model's parameters.

    Args:
        model: The whole model on the meta device, before anything of it is cut or left out.
    """

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        entries = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in entries if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in entries if isinstance(entry, WeightConverter)]
        self._by_pattern = {pattern: entry for entry in self._converters for pattern in entry.source_patterns}
        self._prefix = model.base_model_prefix
        self._whole = {name: tensor.shape for name, tensor in model.state_dict().items()}
        self._state = model.state_dict()

    def narrow(
        self, tensors: MutableMapping[str, Any], model: Any, shares: Mapping[str, Share], absent: Callable[[str], bool]
    ) -> dict[str, Share]:
        """Make `tensors` read this rank's part, and drop those that it has nothing of.

        Args:
            tensors: Checkpoint name -> slice; changed in place.
            model: The rank's own, cut; parameters that must be read whole are made whole again.
            shares: Of each parameter that was cut.
            absent: Whether a parameter of the whole model is not on this rank.

        Returns:
            The shares of parameters that are still whole, for `finish`.
        """
        sliced: set[str] = set()
        for name, tensor in list(tensors.items()):
            target = self._target(name)
            if absent(target.name):
                del tensors[name]
                continue
            share = shares.get(target.name)
            own = None if share is None else self._own(tensor, target, share)
            if own is not None:
                tensors[name] = _Sliced(tensor, own)
                sliced.add(target.name)
        tied = (getattr(model, "all_tied_weights_keys", None) or {}).keys()
        late = {name: share for name, share in shares.items() if name not in sliced and name not in tied}
        for name in late:
            owner, child = _owner(model, name)
            part = getattr(owner, child)
            whole = torch.empty(self._whole[name], dtype=part.dtype, device=part.device)
            setattr(owner, child, nn.Parameter(whole, requires_grad=False))
        return late

    def _target(self, name: str) -> _Target:
        from transformers.core_model_loading import rename_source_key

        renamed, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self._state)
        if renamed not in self._whole and name in self._whole:
            renamed, pattern = rename_source_key(name, [], [], self._prefix, self._state)
        return _Target(renamed, None if pattern is None else self._by_pattern[pattern])

    def _own(self, tensor: Any, target: _Target, share: Share) -> Share | None:
        """What to read of a tensor that ends in a cut parameter; None if it must be read whole."""
        size = tensor.get_shape()[share.dim] if len(tensor.get_shape()) >= -share.dim else None
        if target.converter is None:
            return share if size == share.size else None
        if any(type(step).__name__ not in _COMMUTING for step in target.converter.operations):
            return None
        if len(target.converter.target_patterns) != 1 or len(target.converter.source_patterns) not in (1, share.parts):
            return None
        own = share if len(target.converter.source_patterns) == 1 else share.of_part()
        return own if size == own.size else None


def finish(model: Any, late: Mapping[str, Share]) -> None:
    """Cut the parameters that were read whole."""
    for name, share in late.items():
        owner, child = _owner(model, name)
        whole = getattr(owner, child)
        setattr(owner, child, nn.Parameter(share.cut(whole.data), requires_grad=False))


def _owner(model: Any, name: str) -> tuple[Any, str]:
    parent, _, child = name.rpartition(".")
    return model.get_submodule(parent), child
