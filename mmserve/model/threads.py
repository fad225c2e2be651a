"""Helper threads of OpenMP that nobody needs any more.

Each thread that runs torch's operations on several cores gets helpers of its own, which stay. Between two operations
helpers wait awake for the next, but only as long as all of the process's together are no more than the cores: with a
second team about, even an idle one, they go to sleep at once and are woken for each operation. A step of one sequence
is some hundred operations of a tenth of a millisecond, so that waking took a third of it.
"""

from __future__ import annotations

from typing import Final

from processors.one_thread import openmp_function

__all__ = ["end_idle_helpers"]

_SOFT: Final = 1
"""omp_pause_soft of OpenMP 5.0: threads end, settings stay."""


def end_idle_helpers() -> None:
    """End the calling thread's OpenMP helpers; its next operation on several cores starts new ones.

    Without OpenMP, or with one before 5.0, nothing happens.
    """
    pause = openmp_function("omp_pause_resource_all")
    if pause is not None:
        pause(_SOFT)
