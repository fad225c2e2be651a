"""How one dimension of a weight is dealt to ranks, and which part is whose.

A share is a list of half-open ranges of one dimension. Most have one range; a fused weight (gates above ups) has one a
part, so that what stood together stays fused::

    gate_up [2 m, w] over two ranks         rank 0           rank 1
    ┌────────────┐                          gates 0..m/2     gates m/2..m
    │ gates      │   ranges of dimension 0  ups   0..m/2     ups   m/2..m
    │ ups        │
    └────────────┘

Sizes that do not divide go by whole units, the first ranks one more. Query heads follow their key and value head, so
attention's units are groups of heads; where there are fewer key and value heads than ranks, ranks share a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mmserve.errors import UnsupportedModelError

__all__ = ["HeadShare", "Share", "balanced", "share_heads", "share_packed", "share_width"]


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a dimension.

    Attributes:
        dim: Of the tensor, counted from its end (-1 is the last), so that stacks of tensors share it.
        size: Of the whole dimension.
        ranges: Half-open, ascending.
        parts: How many equal parts the dimension is fused from, each of which holds a range a rank.
    """

    dim: int
    size: int
    ranges: tuple[tuple[int, int], ...]
    parts: int = 1

    @property
    def length(self) -> int:
        """Entries of the dimension that are this rank's."""
        return sum(stop - start for start, stop in self.ranges)

    def of_part(self) -> Share:
        """The share of one part alone, for weights that are stored part by part."""
        start, stop = self.ranges[0]
        return Share(self.dim, self.size // self.parts, ((start, stop),))

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """The shape that is left of a whole tensor's."""
        shape = list(whole)
        shape[self.dim] = self.length
        return tuple(shape)

    def indices(self, ndim: int) -> tuple[tuple[slice, ...], ...]:
        """What to index a tensor of `ndim` dimensions by, a piece each, to be joined along `dim`."""
        before = (slice(None),) * (ndim + self.dim)
        after = (slice(None),) * (-self.dim - 1)
        return tuple((*before, slice(start, stop), *after) for start, stop in self.ranges)

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor, in storage of its own."""
        return torch.cat([tensor[index] for index in self.indices(tensor.dim())], dim=self.dim)


def balanced(size: int, parts: int, index: int) -> tuple[int, int]:
    """Half-open range number `index` of `size` dealt into `parts`; the first ones get what is left over."""
    each, more = divmod(size, parts)
    start = index * each + min(index, more)
    return start, start + each + (index < more)


def share_width(dim: int, size: int, rank: int, ranks: int) -> Share:
    """A plain dimension, one range a rank."""
    return Share(dim, size, (balanced(size, ranks, rank),))


def share_packed(dim: int, size: int, parts: int, rank: int, ranks: int) -> Share:
    """A dimension fused from `parts` equal parts."""
    each = size // parts
    start, stop = balanced(each, ranks, rank)
    return Share(dim, size, tuple((part * each + start, part * each + stop) for part in range(parts)), parts)


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The heads of one attention layer that are one rank's: half-open ranges of query and of key and value heads."""

    num_heads: int
    num_kv_heads: int
    heads: tuple[int, int]
    kv_heads: tuple[int, int]

    @property
    def group(self) -> int:
        """Query heads a key and value head, on this rank."""
        return (self.heads[1] - self.heads[0]) // (self.kv_heads[1] - self.kv_heads[0])

    def of_queries(self, dim: int, size: int) -> Share:
        """The share of a dimension that holds all query heads, each as wide as any other."""
        return _by_units(dim, size, self.num_heads, self.heads)

    def of_keys(self, dim: int, size: int) -> Share:
        """The same for key and value heads."""
        return _by_units(dim, size, self.num_kv_heads, self.kv_heads)


def _by_units(dim: int, size: int, units: int, whose: tuple[int, int]) -> Share:
    if size % units:
        raise UnsupportedModelError(f"a projection of {size} rows can not be dealt out by its {units} heads")
    width = size // units
    return Share(dim, size, ((whose[0] * width, whose[1] * width),))


def share_heads(num_heads: int, num_kv_heads: int, rank: int, ranks: int) -> HeadShare:
    """The heads of `rank`: whole groups of query heads with their key and value head, or parts of one group.

    Raises:
        UnsupportedModelError: Neither way works out; says the numbers.
    """
    if num_heads % num_kv_heads:
        raise UnsupportedModelError(f"{num_heads} query heads do not divide by {num_kv_heads} key and value heads")
    group = num_heads // num_kv_heads
    if num_kv_heads >= ranks:
        start, stop = balanced(num_kv_heads, ranks, rank)
        return HeadShare(num_heads, num_kv_heads, (start * group, stop * group), (start, stop))
    copies, left = divmod(ranks, num_kv_heads)
    if left or copies > group:
        ways = [n for n in range(1, num_heads + 1) if n <= num_kv_heads or n % num_kv_heads == 0]
        raise UnsupportedModelError(
            f"{num_heads} query heads over {num_kv_heads} key and value heads can not be dealt to {ranks} ranks; "
            f"tensor_parallel can be {', '.join(map(str, ways))}"
        )
    kv_head, place = divmod(rank, copies)
    start, stop = balanced(group, copies, place)
    return HeadShare(num_heads, num_kv_heads, (kv_head * group + start, kv_head * group + stop), (kv_head, kv_head + 1))
