"""torch on one core for one thread: images processed side by side would otherwise share the cores twice."""

from __future__ import annotations

__all__ = ["use_one_core"]


def use_one_core() -> None:
    """From now on, torch's operations that this thread starts run on it alone. Other threads keep their number.

    `torch.set_num_threads` would set the number of threads that begin later too, so OpenMP is told, whose setting is
    the thread's own. Without OpenMP nothing changes.
    """
    import ctypes

    import torch

    torch.get_num_threads()  # torch sets a thread's number when it first needs it: it must have done so already
    try:
        set_threads = ctypes.CDLL(None).omp_set_num_threads
    except (OSError, AttributeError, TypeError):
        return
    set_threads(1)
