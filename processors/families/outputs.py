"""Outputs that a processor makes without saying what they belong to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["expert_types", "replacement_of_outputs"]


def expert_types(processor: Any, token_ids: Sequence[int], images: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """ERNIE 4.5 VL: which experts a token goes to, [1, T]; like token types, but with the tokens around an image."""
    import torch

    return torch.tensor(processor.create_moe_mm_token_type_ids([list(token_ids)]))


def replacement_of_outputs(processor: Any, outputs: Mapping[str, Any]) -> str:
    """Nemotron: the text of an image follows from its outputs, but the call does not report it."""
    return str(processor.replace_image_token(outputs, 0))
