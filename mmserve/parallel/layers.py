"""Layers of which a rank holds its share, and the one exchange that each needs.

    column            [out/n, in]   nothing: what comes out is this rank's part of the features
    column, gathered  [out/n, in]   all-gather of the features
    row               [out, in/n]   all-reduce of the sums, then the bias, once
    row, whole input  [out, in/n]   takes its part of a whole input first
    vocabulary        [V/n, w]      rows of other ranks read as zeros, all-reduce

A column layer is a plain `nn.Linear` of fewer rows, so whatever takes plain linears takes it too. Layers that exchange
name the product of their own part as `product`, so that a faster one can take its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

from mmserve.parallel.group import Group
from mmserve.parallel.shares import Share

__all__ = [
    "ExchangedLinear",
    "GatheredLinear",
    "RowLinear",
    "gather_embedding",
    "gather_features",
    "look_up_own_rows",
    "sum_output",
]


Product: TypeAlias = "Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]"
"""input [..., in], weight [out, in], bias [out] or None -> [..., out]."""


class ExchangedLinear(nn.Linear):
    """A linear layer whose product is followed by an exchange.

    Attributes:
        group: The ranks that share the layer.
        product: Of this rank's part.
    """

    group: Group
    product: Product = staticmethod(F.linear)


class GatheredLinear(ExchangedLinear):
    """This rank's columns of a linear layer; every rank gets the whole output. Made by `become`."""

    widths: tuple[int, ...]

    @staticmethod
    def become(linear: nn.Linear, group: Group, widths: tuple[int, ...]) -> None:
        """Turn a linear whose weight was cut into this, in place; `widths`: each rank's number of columns."""
        linear.__class__ = GatheredLinear
        linear.group, linear.widths = group, widths  # type: ignore[assignment]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., all ranks' out_features]."""
        return gather_features(self.product(input, self.weight, self.bias), self.group, self.widths)


class RowLinear(ExchangedLinear):
    """A linear layer over this rank's part of the input features. Made by `become`.

    The sum over ranks is taken before the bias is added, so that it is added once.
    """

    own: tuple[int, int] | None

    @staticmethod
    def become(linear: nn.Linear, group: Group, own: tuple[int, int] | None) -> None:
        """Turn a linear whose weight was cut into this, in place; `own`: this rank's features of a whole input."""
        linear.__class__ = RowLinear
        linear.group, linear.own = group, own  # type: ignore[assignment]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., own or all input features] -> [..., out_features]."""
        if self.own is not None:
            input = input[..., self.own[0] : self.own[1]]
        out = self.group.all_reduce(self.product(input, self.weight, None))
        return out if self.bias is None else out + self.bias


def gather_features(own: torch.Tensor, group: Group, widths: tuple[int, ...]) -> torch.Tensor:
    """[..., this rank's width] of each rank -> [..., sum of widths]; narrower ones are padded on the way."""
    widest = max(widths)
    padded = F.pad(own, (0, widest - own.shape[-1])) if own.shape[-1] < widest else own
    parts = group.all_gather(padded)
    return torch.cat([part[..., :width] for part, width in zip(parts, widths, strict=True)], dim=-1)


def look_up_own_rows(embedding: Any, group: Group, share: Share) -> None:
    """Let an embedding that holds some rows of the table alone answer for all ids, together with the other ranks.

    Its own forward runs inside, with the scale or whatever else the family gives it.
    """
    start, stop = share.ranges[0]
    plain: Callable[[torch.Tensor], torch.Tensor] = embedding.forward

    def forward(input: torch.Tensor) -> torch.Tensor:
        elsewhere = (input < start) | (input >= stop)
        rows = plain((input - start).masked_fill(elsewhere, 0))
        return group.all_reduce(rows.masked_fill(elsewhere.unsqueeze(-1), 0))

    embedding.forward = forward


def gather_embedding(embedding: Any, group: Group, widths: tuple[int, ...]) -> None:
    """Let an embedding that holds some columns of the table alone answer with whole rows."""
    plain: Callable[[torch.Tensor], torch.Tensor] = embedding.forward
    embedding.forward = lambda input: gather_features(plain(input), group, widths)


def sum_output(module: Any, group: Group) -> None:
    """Let a module whose output is this rank's part of a sum (experts, of each its share) answer with the sum."""
    own: Callable[..., torch.Tensor] = module.forward
    module.forward = lambda *args, **kwargs: group.all_reduce(own(*args, **kwargs))
