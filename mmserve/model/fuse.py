"""Weights of several projections in one tensor, and small float32 copies of layers to try a replacement on."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["float_twin", "join_weights"]


def join_weights(parts: Sequence[nn.Linear]) -> torch.Tensor:
    """The weights of `parts` in one tensor [sum of rows, in], which they are views of afterwards: no copy is kept."""
    fused = torch.cat([part.weight.data for part in parts])
    start = 0
    for part in parts:
        part.weight.data = fused[start : start + part.out_features]
        start += part.out_features
    return fused


def float_twin(layer: Any, narrow: Mapping[nn.Parameter, torch.Tensor], shared: Iterable[object] = ()) -> Any:
    """A float32 copy of a layer, with the tensors of `narrow` in the place of those parameters.

    `shared`: What the copy keeps as it is (the group of ranks that a layer is dealt to).

    An MLP is most of a layer's weights, and what it computes shows in a few of its columns as in all: with those
    alone a trial holds little more than the layer's attention in float32.
    """
    smaller = {id(parameter): tensor for parameter, tensor in narrow.items()}
    copies: dict[int, Any] = {id(thing): thing for thing in shared} | {
        id(parameter): nn.Parameter(
            smaller.get(id(parameter), parameter).detach().to(torch.float32, copy=True).contiguous(),
            requires_grad=False,
        )
        for parameter in layer.parameters()
    }
    twin = copy.deepcopy(layer, copies)
    for part in twin.modules():
        if isinstance(part, nn.Linear):
            part.out_features, part.in_features = part.weight.shape
    return twin.float()
