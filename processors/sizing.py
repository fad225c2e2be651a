"""The most tokens that one image can take, found by search: a picture of odd proportions may take about 1 % more.

Where the processor declares counts, pictures of up to 10,000 a side are asked about in many proportions and sizes, and
only the one that takes the most is made. Elsewhere blank pictures of growing size are processed, in each proportion
until twice the sides take no more tokens, up to 4,096 a side; `bounded` says whether the counts had stopped growing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from processors.counts import DeclaredCounts, ImageCounts
from processors.errors import ProcessorError, UnsupportedProcessorError
from processors.expand import call_errors

__all__ = ["LargestImage", "find_largest"]

_LONGEST = 10_000
_LONGEST_MADE = (1_024, 2_048, 4_096)
_RATIOS = (1.0, 0.75, 1 / 0.75, 0.5, 2.0, 1 / 3, 3.0, 0.1, 10.0)
"""Width to height of the pictures that are tried."""
_MORE_RATIOS = (*_RATIOS, 0.8, 1.25, 0.625, 1.6, 2 / 3, 1.5, 0.2, 5.0)
"""Where asking costs nothing."""
_UNITS = (1, 28, 32)
"""Sizes are also tried as multiples of these: a picture that fits a limit exactly loses nothing to rounding."""

Size = tuple[int, int]


@dataclass(frozen=True, slots=True)
class LargestImage:
    """The picture that takes the most tokens.

    Attributes:
        length: Tokens that stand for it in a prompt.
        num_embeds: Those of them that take a feature row.
        size: (width, height) of a picture that takes as many.
        bounded: Whether larger pictures are known to take no more.
    """

    length: int
    num_embeds: int
    size: Size
    bounded: bool


def find_largest(counts: DeclaredCounts, make: Callable[[Size], ImageCounts]) -> LargestImage:
    """Search; `make` processes a blank picture of (width, height) and counts its tokens.

    Raises:
        UnsupportedProcessorError: No size that was tried can be processed.
    """
    if counts.kind is not None:
        return _by_declaration(counts, make)
    best: LargestImage | None = None
    bounded = True
    for ratio in _RATIOS:
        found = _by_growing(make, ratio)
        if found is None:
            continue
        bounded = bounded and found.bounded
        if best is None or found.length > best.length:
            best = found
    if best is None:
        raise UnsupportedProcessorError("this processor takes no picture of any size that was tried")
    return replace(best, bounded=bounded)


def _by_growing(make: Callable[[Size], ImageCounts], ratio: float) -> LargestImage | None:
    """The largest of one proportion, the smallest picture that takes as many; None if every size is refused."""
    largest: LargestImage | None = None
    for longest in _LONGEST_MADE:
        made = _attempt(make, _picture(longest, ratio))
        if made is None:
            continue
        if largest is not None and made.length <= largest.length:
            return replace(largest, bounded=True)
        largest = LargestImage(made.length, made.embeds, _picture(longest, ratio), bounded=False)
    return largest


def _by_declaration(counts: DeclaredCounts, make: Callable[[Size], ImageCounts]) -> LargestImage:
    best, best_size = 0, (1, 1)
    beyond = 0
    for ratio in _MORE_RATIOS:
        beyond = max(beyond, _ask(counts, _picture(2 * _LONGEST, ratio)))
        longest = float(_LONGEST)
        while longest >= 32:
            for unit in _UNITS:
                size = _in_units(_picture(round(longest), ratio), unit)
                count = _ask(counts, size)
                if count >= best and (count > best or size < best_size):
                    best, best_size = count, size
            longest /= 2**0.25
    made = make(best_size)
    return LargestImage(made.length, made.embeds, best_size, bounded=beyond <= best)


def _in_units(size: Size, unit: int) -> Size:
    return max(unit, size[0] // unit * unit), max(unit, size[1] // unit * unit)


def _picture(longest: int, ratio: float) -> Size:
    if ratio >= 1:
        return longest, max(1, round(longest / ratio))
    return max(1, round(longest * ratio)), longest


def _ask(counts: DeclaredCounts, size: Size) -> int:
    """The declared count; -1 for a size that the processor refuses."""
    try:
        return counts.declared(size) or 0
    except call_errors():
        return -1


def _attempt(make: Callable[[Size], ImageCounts], size: Size) -> ImageCounts | None:
    """The counts of a size; None if the processor refuses it."""
    try:
        return make(size)
    except ProcessorError:
        return None
