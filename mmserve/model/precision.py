"""The dtype and device a model runs in: what was asked for, what the checkpoint has, what the device can do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mmserve.errors import ConfigError

__all__ = ["Precision", "resolve_device", "resolve_precision"]

_BY_NAME = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BY_SAFETENSORS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtype of weights and activations, and why."""

    dtype: torch.dtype
    reason: str


def resolve_device(device: str | torch.device) -> torch.device:
    """ "auto": the first CUDA device, else the CPU. Raises ConfigError for a device that is not there."""
    if device == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {device!r}: {str(error).splitlines()[0]}") from None
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {str(device)!r} was asked for, and torch finds no CUDA device here")
    if resolved.type == "cuda" and resolved.index is not None and resolved.index >= torch.cuda.device_count():
        raise ConfigError(
            f"device {str(device)!r} was asked for, and there are {torch.cuda.device_count()} CUDA devices here, "
            "counted from cuda:0"
        )
    if resolved.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {str(device)!r} is not supported; known: auto, cpu, cuda, cuda:N")
    return resolved


def resolve_precision(
    asked: str | torch.dtype, tensors: Mapping[str, str], config: Any, device: torch.device
) -> Precision:
    """The dtype to run in.

    Args:
        asked: "auto", a name, or a torch dtype.
        tensors: Tensor name -> dtype of the checkpoint, as safetensors spells it.
        config: The model's config (its own dtype, where the weights give none).
        device: Where the model will be.

    Raises:
        ConfigError: Not a dtype that models run in.
    """
    if asked != "auto":
        dtype = _BY_NAME.get(asked.removeprefix("torch.")) if isinstance(asked, str) else asked
        if dtype is None or dtype not in _BY_NAME.values():
            raise ConfigError(f"dtype {str(asked)!r} is not supported; known: auto, {', '.join(_BY_NAME)}")
        return Precision(dtype, "as asked")
    own = _checkpoint_dtype(tensors) or getattr(config, "dtype", None) or torch.float32
    if own == torch.float16 and device.type == "cpu":
        return Precision(
            torch.bfloat16,
            "the checkpoint is float16, which a CPU computes several times slower than bfloat16",
        )
    return Precision(own, "the checkpoint's own")


def _checkpoint_dtype(tensors: Mapping[str, str]) -> torch.dtype | None:
    """What most of the floating-point tensors are kept in: a stray float32 buffer decides nothing."""
    counts: dict[torch.dtype, int] = {}
    for name in tensors.values():
        if name in _BY_SAFETENSORS:
            dtype = _BY_SAFETENSORS[name]
            counts[dtype] = counts.get(dtype, 0) + 1
    return max(counts, key=lambda dtype: counts[dtype]) if counts else None
