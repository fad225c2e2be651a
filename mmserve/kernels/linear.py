"""`nn.Linear` whose products of a few rows run at the speed that its weight can be read at."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from mmserve.kernels.library import kernels

__all__ = ["FewRowLinear", "weight_declines", "weight_product"]


def weight_declines(weight: torch.Tensor) -> str | None:
    """None if `weight_product` takes a weight [out, in], else why not."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.bfloat16, torch.float32):
        return f"its weight is {weight.dtype} on {weight.device.type}"
    if not weight.numel() or weight.shape[1] % 2 or not weight.is_contiguous():
        return f"its weight of {tuple(weight.shape)} is not in dense rows of an even length"
    return None


def weight_product(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """input [..., in] times weight [out, in], plus bias [out] -> [..., out], by whichever kernel suits the rows."""
    library = kernels()
    rows = input.numel() // weight.shape[1]
    few = rows <= library.most_linear_rows
    many = library.dense_pays(rows, weight.element_size())
    if not (few or many) or input.dtype != weight.dtype:
        return F.linear(input, weight, bias)
    flat = input.reshape(rows, weight.shape[1])
    out = library.linear(flat, weight, bias, None) if few else library.dense(flat, weight, bias, None, "none")
    return out.view(*input.shape[:-1], weight.shape[0])


class FewRowLinear(nn.Linear):
    """A linear layer; up to 16 rows go through one kernel, more through another where that pays, else through torch.

    The weight stays as it is, row by row: nothing is packed or copied, a tied embedding stays tied, and the
    state dict does not change. `take_over` turns an existing layer into one in place.
    """

    @staticmethod
    def declines(linear: nn.Module) -> str | None:
        """None if `linear` can become a FewRowLinear, else why not."""
        if type(linear) is not nn.Linear:
            return f"it is a {type(linear).__name__}, not a plain Linear"
        return weight_declines(linear.weight)

    @staticmethod
    def take_over(linear: nn.Linear) -> None:
        """Make `linear` a FewRowLinear, keeping its parameters, hooks and place in the model."""
        reason = FewRowLinear.declines(linear)
        if reason is not None:
            raise ValueError(f"this layer can not become a FewRowLinear: {reason}")
        linear.__class__ = FewRowLinear

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        return weight_product(input, self.weight, self.bias)
