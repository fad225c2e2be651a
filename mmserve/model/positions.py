"""Positions of a whole prompt, computed once per request by the model's own rule."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mmserve.errors import InputError
from processors.types import ProcessedPrompt

__all__ = ["find_rope_index", "image_type_ids", "mrope_positions", "plain_positions"]

_GIVEN = frozenset({"self", "input_ids", "mm_token_type_ids", "attention_mask", "kwargs"})


def find_rope_index(model: nn.Module) -> Callable[..., Any] | None:
    """The model's `get_rope_index`, which families with M-RoPE have; None for plain positions."""
    for owner in (model, getattr(model, "model", None)):
        found = getattr(owner, "get_rope_index", None)
        if callable(found):
            return found
    return None


def plain_positions(prompt: ProcessedPrompt) -> torch.Tensor:
    """0, 1, 2, ...: int64 [1, T]."""
    return torch.arange(len(prompt.token_ids))[None]


def image_type_ids(prompt: ProcessedPrompt) -> torch.Tensor:
    """1 where an image row is placed, 0 elsewhere: int64 [1, T].

    Made from the ranges and not by looking for the image token, which user text may contain.
    """
    types = torch.zeros(1, len(prompt.token_ids), dtype=torch.long)
    for image in prompt.images:
        types[0, list(image.range.embed_positions())] = 1
    return types


def mrope_positions(rope_index: Callable[..., Any], prompt: ProcessedPrompt) -> tuple[torch.Tensor, int]:
    """Positions int64 [P, T] and the delta of generated tokens, from the model's `get_rope_index`.

    Raises:
        InputError: The prompt's images lack a tensor that the rule reads, or do not fit their ranges.
    """
    parameters = inspect.signature(rope_index).parameters
    tensors = {}
    for name in parameters.keys() - _GIVEN:
        given = [image.tensors[name] for image in prompt.images if name in image.tensors]
        if given:
            tensors[name] = torch.cat(given)
        elif prompt.images and name == "image_grid_thw":
            raise InputError(f"the images of this prompt come without {name}, which their positions depend on")
    ids = torch.tensor([prompt.token_ids])
    if "attention_mask" in parameters:
        tensors["attention_mask"] = torch.ones_like(ids)
    if "mm_token_type_ids" in parameters:
        tensors["mm_token_type_ids"] = image_type_ids(prompt)
    try:
        positions, delta = rope_index(input_ids=ids, **tensors)
    except (RuntimeError, IndexError, StopIteration) as error:
        raise InputError(f"the images' grids do not fit their ranges in the prompt: {error}") from error
    return positions[:, 0], int(delta.reshape(-1)[0])
