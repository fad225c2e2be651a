"""Layers of a vision tower as one call into the library."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from mmserve.kernels.library import native_module

__all__ = ["ACTIVATIONS", "EncoderWeights", "NativeEncoderLayer"]

ACTIVATIONS = ("gelu_tanh", "quick_gelu")
"""Of an MLP, by the library's names: GELU in the tanh form, and x times the sigmoid of 1.702 x."""


@dataclass(frozen=True, slots=True)
class EncoderWeights:
    """Weights of one layer, all of one dtype; w its width, m the MLP's, H heads of size D.

    Attributes:
        input_norm, middle_norm: Layer norms [w], their biases and epsilons with them.
        qkv: [3 H D, w], queries first; qkv_bias: [3 H D].
        output: [w, H D]; output_bias: [w].
        up: [m, w]; up_bias: [m]. down: [w, m]; down_bias: [w].
    """

    input_norm: torch.Tensor
    input_norm_bias: torch.Tensor
    input_eps: float
    qkv: torch.Tensor
    qkv_bias: torch.Tensor
    output: torch.Tensor
    output_bias: torch.Tensor
    middle_norm: torch.Tensor
    middle_norm_bias: torch.Tensor
    middle_eps: float
    up: torch.Tensor
    up_bias: torch.Tensor
    down: torch.Tensor
    down_bias: torch.Tensor


class NativeEncoderLayer:
    """h + attention(norm(h)), then h + down(activation(up(norm(h)))), every row of an image seeing every other."""

    def __init__(self, weights: EncoderWeights, num_heads: int, scale: float, activation: str) -> None:
        library = native_module()
        if library is None:
            raise RuntimeError("there is no compiled library: ask mmserve.kernels.library.status() first")
        ordered = [getattr(weights, field.name) for field in fields(weights)]
        self._native: Any = library.EncoderLayer(*ordered, num_heads, scale, activation)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [images, patches, w], contiguous -> the same shape; images do not see each other."""
        out: torch.Tensor = self._native.forward(hidden)
        return out
