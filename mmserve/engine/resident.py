"""Resident memory of this process, now and at its peak: what Linux' /proc says, elsewhere the most there ever was."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["Resident", "can_reset_peak", "reset_peak", "resident"]

_STATUS: Final = Path("/proc/self/status")
_RESET: Final = Path("/proc/self/clear_refs")


@dataclass(frozen=True, slots=True)
class Resident:
    """Bytes, of allocated pages and of mapped files: `now` (VmRSS), and `peak`, the most since the last reset (VmHWM).

    Without /proc both are the most there ever were: more than wanted, never less.
    """

    now: int
    peak: int


def resident() -> Resident:
    """Of this process."""
    try:
        lines = dict(line.split(":", 1) for line in _STATUS.read_text(encoding="ascii").splitlines())
        now, peak = (int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    except (OSError, KeyError, ValueError):
        return _most()
    return Resident(now, peak)


def can_reset_peak() -> bool:
    """Whether `reset_peak` has an effect here."""
    return _STATUS.is_file() and _RESET.is_file()


def reset_peak() -> None:
    """Let `peak` start again from what is resident now; without /proc it stays."""
    try:
        _RESET.write_text("5", encoding="ascii")
    except OSError:
        return


def _most() -> Resident:
    import resource
    import sys

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    most = most if sys.platform == "darwin" else most * 1024
    return Resident(most, most)
