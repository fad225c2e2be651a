"""A measurement of memory in a process of its own."""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

from mmserve.bench.report import json_line
from mmserve.engine.resident import can_reset_peak, reset_peak, resident
from mmserve.errors import MMServeError

__all__ = ["MiB", "measure_apart", "say_result", "start_measuring"]

MiB: Final = 2**20


def measure_apart(module: str, arguments: Sequence[str], failed: str) -> dict[str, Any]:
    """The result of `python -m module arguments`, which ends with `say_result`.

    Raises:
        MMServeError: The system is not Linux; or the process failed: `failed`, and the last line that it said.
    """
    if not can_reset_peak():
        raise MMServeError("the peak of memory is read from Linux' /proc, which is not here")
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise MMServeError(f"{failed}: {(done.stderr.strip().splitlines() or ['no reason'])[-1]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def start_measuring() -> int:
    """Bytes resident now, without what the allocator only keeps in hand (glibc); the peak starts from there."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    reset_peak()
    return resident().now


def say_result(measure: Callable[[], dict[str, Any]]) -> int:
    """In that process: print what `measure` returns, or its error. Returns the exit status."""
    try:
        result = measure()
    except MMServeError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1
    print(json_line(result))  # noqa: T201
    return 0
