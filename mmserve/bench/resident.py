"""Resident memory of a process, and a measurement in a process of its own; read from Linux' /proc."""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mmserve.bench.report import json_line
from mmserve.errors import MMServeError

__all__ = ["MiB", "Resident", "apart", "reset_peak", "resident", "say_result"]

MiB: Final = 2**20
_STATUS: Final = Path("/proc/self/status")
_RESET: Final = Path("/proc/self/clear_refs")


@dataclass(frozen=True, slots=True)
class Resident:
    """Bytes: `now` (VmRSS), and `peak`, the most since the last reset (VmHWM). Allocated pages and mapped ones."""

    now: int
    peak: int


def resident() -> Resident:
    """Of this process."""
    lines = dict(line.split(":", 1) for line in _STATUS.read_text(encoding="ascii").splitlines())
    now, peak = (int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return Resident(now, peak)


def reset_peak() -> None:
    """Let `peak` start again from what is resident now, less what the allocator only keeps in hand (glibc)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    _RESET.write_text("5", encoding="ascii")


def apart(module: str, arguments: Sequence[str], failed: str) -> dict[str, Any]:
    """The result of `python -m module arguments`, which ends with `say_result`.

    Raises:
        MMServeError: The system is not Linux; or the process failed: `failed`, and the last line that it said.
    """
    if not _STATUS.is_file() or not _RESET.is_file():
        raise MMServeError("the peak of memory is read from Linux' /proc, which is not here")
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise MMServeError(f"{failed}: {(done.stderr.strip().splitlines() or ['no reason'])[-1]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def say_result(measure: Callable[[], dict[str, Any]]) -> int:
    """In that process: print what `measure` returns, or its error. Returns the exit status."""
    try:
        result = measure()
    except MMServeError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1
    print(json_line(result))  # noqa: T201
    return 0
