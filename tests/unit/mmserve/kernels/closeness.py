"""How near to float64 a kernel has to be."""

from __future__ import annotations

import torch

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.2e-2}
"""Of 1 + |expected|: for bfloat16 one rounding of the result (2^-8) and the rounded operands that go into it."""

DTYPES = [torch.float32, torch.bfloat16]


def assert_near(actual: torch.Tensor, expected: torch.Tensor, *, factor: float = 1.0) -> None:
    """`actual` [...] against float64 `expected` [...]."""
    assert actual.shape == expected.shape
    assert torch.isfinite(actual).all()
    error = ((actual.double() - expected).abs() / (1 + expected.abs())).max().item()
    assert error <= factor * TOLERANCE[actual.dtype], f"off by {error:.2e}"
