"""The kernels of this process: compiled if they can be, else torch code, chosen once and never silently."""

from __future__ import annotations

import importlib
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from mmserve.errors import ConfigError

if TYPE_CHECKING:
    from mmserve.kernels.interface import KernelLibrary

__all__ = ["KernelStatus", "kernels", "native_module", "status"]


@dataclass(frozen=True, slots=True)
class KernelStatus:
    """What serves the kernels' functions.

    Attributes:
        native: Whether they are compiled. instruction_set: Which one runs ("amx", "avx512", "avx2", "plain").
        reason: Where the library came from, or why there is none.
    """

    native: bool
    instruction_set: str | None
    reason: str

    def describe(self) -> dict[str, object]:
        """JSON-friendly."""
        return {"native": self.native, "instruction_set": self.instruction_set, "reason": self.reason}


_lock = threading.Lock()
_loaded: tuple[Any, str] | None = None


def kernels() -> KernelLibrary:
    """The functions of `KernelLibrary`: the compiled library, or the torch code."""
    module = native_module()
    return cast("KernelLibrary", module or importlib.import_module("mmserve.kernels.fallback"))


def native_module() -> Any | None:
    """The compiled library, or None where there is none; compiles it if this is the first call on this machine.

    Raises:
        ConfigError: MMSERVE_KERNELS is not a word it knows, or names an instruction set that can not run here.
    """
    return _load()[0]


def status() -> KernelStatus:
    """What was loaded, and why."""
    module, reason = _load()
    return KernelStatus(module is not None, module.active_instruction_set() if module else None, reason)


def _load() -> tuple[Any, str]:
    global _loaded
    with _lock:
        if _loaded is None:
            _loaded = _choose(os.environ.get("MMSERVE_KERNELS", "auto"))
        return _loaded


def _choose(wanted: str) -> tuple[Any, str]:
    from mmserve.kernels.build import BuildError, build

    if wanted not in ("auto", "off", "amx", "avx512", "avx2", "plain"):
        raise ConfigError(f"MMSERVE_KERNELS is {wanted!r}; known: auto, off, amx, avx512, avx2, plain")
    if wanted == "off":
        return None, "switched off by MMSERVE_KERNELS"
    try:
        module, reason = build()
    except BuildError as error:
        return None, str(error)
    if wanted != "auto":
        if wanted not in module.available_instruction_sets():
            raise ConfigError(f"MMSERVE_KERNELS is {wanted!r}, which this processor can not run")
        module.use_instruction_set(wanted)
    missing = module.missing_instruction_set()
    return module, f"{reason}; without {missing}" if missing else reason
