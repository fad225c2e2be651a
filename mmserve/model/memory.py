"""Freed memory back to the system.

glibc keeps what is freed for the process's next allocations. Loading frees pieces of every size between what
stays, and only asking returns them: without, a process that loaded 420 MB stays 100 MB larger.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Final

__all__ = ["give_back", "give_back_after"]

_WORTHWHILE: Final = 8 * 2**20


def give_back() -> None:
    """Return free memory to the system, where its allocator can be asked to; elsewhere nothing happens."""
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
    if trim is not None:
        trim(0)


def give_back_after(nbytes: int) -> None:
    """`give_back`, if tensors of so many bytes were made or freed: a millisecond, which a large picture is worth."""
    if nbytes >= _WORTHWHILE:
        give_back()
