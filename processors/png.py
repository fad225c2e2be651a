"""The checks of a PNG file that Pillow leaves out: checksums of the picture's own chunks, and the end mark.

A file is a signature and chunks, each `length (4) kind (4) data checksum (4)`; the last is IEND (PNG specification,
third edition, section 5).
"""

from __future__ import annotations

import zlib

from processors.errors import MediaError

__all__ = ["check_png"]

_SIGNATURE = 8
_AROUND = 12
"""Bytes of a chunk beside its data."""


def check_png(data: bytes, name: str) -> None:
    """Raises MediaError if the file is cut off, or a chunk that the picture depends on is damaged."""
    view = memoryview(data)
    position = _SIGNATURE
    while position + _AROUND <= len(data):
        kind = data[position + 4 : position + 8]
        end = position + _AROUND + int.from_bytes(view[position : position + 4], "big")
        if end > len(data):
            break
        # A chunk whose name begins with a small letter is a remark: a damaged one does not change the picture.
        if kind[:1].isupper() and zlib.crc32(view[position + 4 : end - 4]) != int.from_bytes(
            view[end - 4 : end], "big"
        ):
            raise MediaError(f"{name} is damaged: the checksum of its {kind.decode('latin-1')!r} part is wrong")
        if kind == b"IEND":
            return
        position = end
    raise MediaError(f"{name} is cut off: the end mark of a PNG file is missing")
