"""A PIL image's pixels, taken apart into planes.

`Image.tobytes` keeps the interpreter's lock while it packs, so that images packed by several threads wait for each
other. numpy does not, and reads the image where it lies: Pillow shows its memory through the Arrow C data interface,
four bytes a pixel, of which RGB uses three. A large image lies in several blocks, which are not shown; it is copied
band by band, and each band is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy
    from PIL import Image

__all__ = ["pack_planes"]

_BAND_PIXELS = 1 << 18
"""Pixels taken apart at a time. They are read three times, which is faster from the core's own cache; smaller bands
would take the interpreter's lock more often, and waiting for it costs more than the cache saves."""


class _ArrowArray(ctypes.Structure):
    """The beginning of `struct ArrowArray`, as far as it is read here."""


_ArrowArray._fields_ = [
    ("length", ctypes.c_int64),
    ("null_count", ctypes.c_int64),
    ("offset", ctypes.c_int64),
    ("n_buffers", ctypes.c_int64),
    ("n_children", ctypes.c_int64),
    ("buffers", ctypes.POINTER(ctypes.c_void_p)),
    ("children", ctypes.POINTER(ctypes.POINTER(_ArrowArray))),
]


def pack_planes(image: Image.Image) -> memoryview:
    """All red values of an RGB image row by row, then all green, then all blue: 3 x height x width bytes."""
    try:
        return _taken_apart(image)
    except (AttributeError, ValueError):  # Pillow before 11.3; or so small blocks that not even a band lies in one
        return memoryview(bytearray().join(image.tobytes("raw", channel) for channel in "RGB"))


def _taken_apart(image: Image.Image) -> memoryview:
    import numpy

    width, height = image.size
    planes = numpy.empty((3, height, width), numpy.uint8)
    shifts = numpy.array([0, 8, 16], numpy.uint32)[:, None, None]
    for top, band in _bands(image, max(1, _BAND_PIXELS // width)):
        part = planes[:, top : top + len(band)]
        numpy.right_shift(band, shifts, out=part, dtype=numpy.uint32, casting="unsafe")  # keeps the lowest byte
    return planes.reshape(-1).data


def _bands(image: Image.Image, rows: int) -> Iterator[tuple[int, numpy.ndarray]]:
    """The first row of each band, and its pixels as `_pixels` gives them."""
    width, height = image.size
    try:
        whole = _pixels(image)
    except ValueError:
        whole = None
    for top in range(0, height, rows):
        end = min(top + rows, height)
        yield top, whole[top:end] if whole is not None else _pixels(image.crop((0, top, width, end)))


def _pixels(image: Image.Image) -> numpy.ndarray:
    """[height, width] numbers of 32 bits, red in the lowest eight: the image's own memory, not to be written to.

    Raises:
        AttributeError: This Pillow does not show it.
        ValueError: It is in several pieces.
    """
    import numpy

    _, capsule = image.__arrow_c_array__()
    prototype = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    address = prototype(("PyCapsule_GetPointer", ctypes.pythonapi))
    values = _ArrowArray.from_address(address(capsule, b"arrow_array")).children[0].contents
    width, height = image.size
    memory: Any = (ctypes.c_uint8 * (4 * width * height)).from_address(values.buffers[1])
    memory.owner = capsule  # the array refers to `memory`: so the image stays
    return numpy.frombuffer(memory, "<u4").reshape(height, width)
