"""How large an image may become by the options of a request: refused before the processor allocates anything.

Options say sides (`size`, `crop_size`, `pad_size`, ...), areas (`max_pixels`), or numbers of tiles and tokens. All are
held against one number of pixels: the limit for pictures that are read, and never more than 4,096 x 4,096.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from processors.errors import OptionError, ProcessorError, shorten

__all__ = ["OptionLimits"]

_MOST_SIDE = 16_384
_MOST_PIXELS = 4_096 * 4_096
"""Of a resized image, whatever pictures may have: a processor keeps several copies of it, in 12 bytes a pixel."""
_MOST_TILES = 1_024
_TOKEN_AREA = 28 * 28
"""Pixels that a token or patch stands for, about."""
_NO_SIZES = frozenset({"image_mean", "image_std", "rescale_factor", "resample"})
_TOKENS = ("token", "num_patches")
_TILES = ("tiles", "crops", "patches", "slices", "splits")


@dataclass(frozen=True, slots=True)
class OptionLimits:
    """What one processor's sizes mean.

    Attributes:
        own: The processor's own settings by name, of those that a request may set. areas: Edges in `size` are areas.
    """

    own: Mapping[str, Any]
    areas: bool

    @classmethod
    def of(cls, image_processor: Any, known: frozenset[str]) -> OptionLimits:
        """Read an image processor's own settings."""
        own = {name: _plain(getattr(image_processor, name, None)) for name in (*known, "do_resize")}
        areas = "max_pixels" in known or _number(own.get("size"), "longest_edge") > _MOST_SIDE
        return cls(own, areas)

    def check(self, options: Mapping[str, object], max_pixels: int) -> None:
        """Raises OptionError naming the first option that is negative, no finite number, or leads to too much."""
        for name, given in options.items():
            value = _plain(given)
            if value is not None and value == self.own.get(name):
                continue
            if name in _NO_SIZES:
                _check_scale(name, given)
                continue
            for number in _numbers(value):
                if not math.isfinite(number) or number < 0:
                    raise OptionError(f"processor option {name!r} must not be {shorten(given)}")
            pixels, side = self._extent(name, value)
            most = min(max_pixels, _MOST_PIXELS)
            if side > _MOST_SIDE:
                raise OptionError(
                    f"processor option {name!r} is {shorten(given)}: over the limit of {_MOST_SIDE:,} a side"
                )
            if pixels > most:
                raise OptionError(
                    f"processor option {name!r} is {shorten(given)}: that may make {pixels:,.0f} pixels of an image, "
                    f"over the limit of {most:,}" + (" (max_image_pixels)" if most == max_pixels else "")
                )
        self._check_tiles(options)

    def check_picture(self, options: Mapping[str, object], size: tuple[int, int], max_pixels: int) -> None:
        """Raises ProcessorError if a picture is so narrow that setting its short side makes it too large."""
        chosen = {**self.own, **{name: _plain(value) for name, value in options.items()}}
        wanted = chosen.get("size")
        if self.areas or not chosen.get("do_resize") or not isinstance(wanted, dict):
            return
        short = _number(wanted, "shortest_edge")
        if not short or _number(wanted, "longest_edge"):
            return
        pixels = short * short * max(size) / min(size)
        if pixels > max_pixels:
            kind = OptionError if "size" in options else ProcessorError
            raise kind(
                f"an image of {size[0]}x{size[1]} would be resized to a short side of {short:g}, {pixels:,.0f} pixels, "
                f"over the limit of {max_pixels:,} (max_image_pixels)"
            )

    def _extent(self, name: str, value: object) -> tuple[float, float]:
        """(pixels, longest side) that an option may lead to; a side of 0 where it says none."""
        largest = max(_numbers(value), default=0.0)
        if "pixels" in name or (name == "size" and self.areas and not _number(value, "height")):
            return largest, 0
        if any(word in name for word in _TOKENS):
            return largest * _TOKEN_AREA, 0
        if any(word in name for word in _TILES):
            return largest * self._tile_area(), 0
        return _sides_area(value), largest

    def _tile_area(self) -> float:
        tile = self.own.get("crop_size") or self.own.get("size")
        return max(1.0, _sides_area(tile)) if not self.areas and tile else 224.0 * 224.0

    def _check_tiles(self, options: Mapping[str, object]) -> None:
        """`max_image_size` is the side of a tile: a small one cuts a picture into very many."""
        tile = _number(_plain(options.get("max_image_size", self.own.get("max_image_size"))), "longest_edge")
        whole = max(_numbers(_plain(options.get("size", self.own.get("size")))), default=0.0)
        if tile and not self.areas and math.ceil(whole / tile) ** 2 > _MOST_TILES:
            name = "max_image_size" if "max_image_size" in options else "size"
            raise OptionError(
                f"processor option {name!r} is {shorten(options.get(name))}: an image of {whole:g} a side would be cut "
                f"into {math.ceil(whole / tile) ** 2:,} tiles of {tile:g} a side, over the limit of {_MOST_TILES:,}"
            )


def _check_scale(name: str, given: object) -> None:
    """Raises OptionError if pixels would be multiplied or divided by what is no finite number, or divided by 0."""
    numbers = list(_numbers(_plain(given)))
    if not all(math.isfinite(number) for number in numbers):
        raise OptionError(f"processor option {name!r} must be finite, not {shorten(given)}")
    if name == "image_std" and 0 in numbers:
        raise OptionError(f"processor option {name!r} must not hold 0, by which pixels would be divided")


def _plain(value: object) -> object:
    """`SizeDict` and its kin as dictionaries; anything else as it is."""
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "__dataclass_fields__"):
        return {key: getattr(value, key) for key in value.__dataclass_fields__ if getattr(value, key) is not None}
    return value


def _numbers(value: object) -> Iterator[float]:
    """Every number in nested lists and dictionaries."""
    if isinstance(value, bool):
        return
    if isinstance(value, Real):
        yield _float(value)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _numbers(item)
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for item in value:
            yield from _numbers(item)


def _float(value: Real) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _number(value: object, key: str) -> float:
    """A number of a dictionary; 0 if it has none."""
    found = value.get(key) if isinstance(value, Mapping) else None
    return _float(found) if isinstance(found, Real) else 0.0


def _sides_area(value: object) -> float:
    """Pixels of the largest picture that sides allow: height times width where both are given, else a square."""
    if isinstance(value, Mapping):
        both = _number(value, "height") * _number(value, "width")
        edges = (item for key, item in value.items() if not both or key not in ("height", "width"))
        return max(both, max((_sides_area(item) for item in edges), default=0.0))
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        if len(value) == 2 and all(isinstance(item, Real) for item in value):
            return _float(value[0]) * _float(value[1])
        return max((_sides_area(item) for item in value), default=0.0)
    return max(_numbers(value), default=0.0) ** 2
