"""torch on one core for one thread: images processed side by side would otherwise share the cores twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["openmp_function", "use_one_core"]


def openmp_function(name: str) -> Callable[..., Any] | None:
    """A function of the OpenMP library that is loaded; None where there is none, or an older one without it."""
    import ctypes

    try:
        return getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):
        return None


def use_one_core() -> None:
    """From now on, torch's operations that this thread starts run on it alone. Other threads keep their number.

    `torch.set_num_threads` would set the number of threads that begin later too, so OpenMP is told, whose setting is
    the thread's own. Without OpenMP nothing changes.
    """
    import torch

    torch.get_num_threads()  # torch sets a thread's number when it first needs it: it must have done so already
    set_threads = openmp_function("omp_set_num_threads")
    if set_threads is not None:
        set_threads(1)
