"""Backends by name, imported when asked for, and the choice among them for each layer."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mmserve.attention.interface import AttentionBackend, AttentionSpec
from mmserve.errors import BackendError

if TYPE_CHECKING:
    import torch

__all__ = ["AUTO_ORDER", "BackendChoice", "choose_backend", "known_backends", "make_backend"]

_FACTORIES: Final = {
    "xformers": ("mmserve.attention.xformers", "XFormersBackend"),
    "native": ("mmserve.attention.native", "NativeBackend"),
    "reference": ("mmserve.attention.reference", "ReferenceBackend"),
}
"""Name -> module and class; the module is imported on first use."""

AUTO_ORDER: Final = ("xformers", "native", "reference")
"""What "auto" tries, fastest first; the last one declines nothing."""


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """The backend of one layer, and why each one tried before it declined ("name: reason")."""

    backend: AttentionBackend
    declined: tuple[str, ...] = ()


def known_backends() -> tuple[str, ...]:
    """Names that `attention_backend=` takes, besides "auto"."""
    return tuple(_FACTORIES)


def make_backend(name: str) -> AttentionBackend:
    """Import and construct the backend called `name`. Raises BackendError for an unknown one."""
    if name not in _FACTORIES:
        raise BackendError(f"unknown attention backend {name!r}; known: auto, {', '.join(known_backends())}")
    module, cls = _FACTORIES[name]
    backend: AttentionBackend = getattr(importlib.import_module(module), cls)()
    return backend


def choose_backend(
    candidates: Sequence[AttentionBackend],
    spec: AttentionSpec,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int,
) -> BackendChoice:
    """The first of `candidates` that serves the layer.

    Raises:
        BackendError: All of them decline; the message holds the layer's shape and every reason.
    """
    declined: list[str] = []
    for backend in candidates:
        reason = backend.declines(spec, dtype, device, block_size)
        if reason is None:
            return BackendChoice(backend, tuple(declined))
        declined.append(f"{backend.name}: {reason}")
    raise BackendError(
        f"no attention backend serves {spec} with {dtype} on {device} and blocks of {block_size}: "
        + "; ".join(declined)
    )
