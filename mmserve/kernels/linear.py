"""`nn.Linear` whose products of a few rows run at the speed that its weight can be read at."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from mmserve.kernels.library import kernels

__all__ = ["FewRowLinear"]


class FewRowLinear(nn.Linear):
    """A linear layer; up to 16 rows go through one kernel, 64 and more through another where that pays, others
    through torch.

    The weight stays as it is, row by row: nothing is packed or copied, a tied embedding stays tied, and the
    state dict does not change. `take_over` turns an existing layer into one in place.
    """

    @staticmethod
    def declines(linear: nn.Module) -> str | None:
        """None if `linear` can become a FewRowLinear, else why not."""
        if type(linear) is not nn.Linear:
            return f"it is a {type(linear).__name__}, not a plain Linear"
        weight = linear.weight
        if weight.device.type != "cpu" or weight.dtype not in (torch.bfloat16, torch.float32):
            return f"its weight is {weight.dtype} on {weight.device.type}"
        if linear.in_features % 2 or not weight.is_contiguous():
            return f"its weight of {tuple(weight.shape)} is not in dense rows of an even length"
        return None

    @staticmethod
    def take_over(linear: nn.Linear) -> None:
        """Make `linear` a FewRowLinear, keeping its parameters, hooks and place in the model."""
        reason = FewRowLinear.declines(linear)
        if reason is not None:
            raise ValueError(f"this layer can not become a FewRowLinear: {reason}")
        linear.__class__ = FewRowLinear

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        library = kernels()
        rows = input.numel() // self.in_features
        few = rows <= library.most_linear_rows
        many = rows >= library.least_dense_rows and library.dense_pays(self.weight.element_size())
        if not (few or many) or input.dtype != self.weight.dtype:
            return F.linear(input, self.weight, self.bias)
        flat = input.reshape(rows, self.in_features)
        if few:
            out = library.linear(flat, self.weight, self.bias, None)
        else:
            out = library.dense(flat, self.weight, self.bias, None, "none")
        return out.view(*input.shape[:-1], self.out_features)
