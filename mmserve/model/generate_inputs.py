"""A processed prompt as the keyword arguments of the plain model's `generate()`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F

from mmserve.errors import InputError
from mmserve.model.positions import image_type_ids
from processors.types import ProcessedPrompt

__all__ = ["generate_inputs"]

_SECOND: Final = ("idefics", "idefics2", "idefics3", "smolvlm", "mllama", "fuyu")
_LAST: Final = ("minicpm_ocr", "minicpmv4_6", "minicpmv4_7")
"""Families that join the images of one prompt along another dimension than the first: all tensors along the second,
or the pixels, which are one row of patches, along the last."""
_TYPES: Final = {"mm_token_type_ids", "moe_mm_token_type_ids"}
_TYPED_PROMPTS: Final[dict[str, bool]] = {"gemma3": True, "shieldgemma2": True, "paligemma": False}
"""Families that read `token_type_ids`, and whether they are 1 at an image; PaliGemma's prompt is all prefix, 0."""


def generate_inputs(model: Any, prompt: ProcessedPrompt) -> dict[str, torch.Tensor]:
    """Ids, attention mask, the joined tensors of all images, the prompt's own tensors, and type ids if taken.

    Raises:
        InputError: The images of one prompt have tensors that do not join.
    """
    device = model.get_input_embeddings().weight.device
    ids = torch.tensor([prompt.token_ids])
    inputs: dict[str, torch.Tensor] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for name in _TYPES & inspect.signature(model.forward).parameters.keys():
        inputs[name] = image_type_ids(prompt)
    if model.config.model_type in _TYPED_PROMPTS:
        types = image_type_ids(prompt)
        inputs["token_type_ids"] = types if _TYPED_PROMPTS[model.config.model_type] else torch.zeros_like(types)
    inputs.update(_joined(prompt, model.config.model_type))
    inputs.update(prompt.prompt_tensors)
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def _joined(prompt: ProcessedPrompt, model_type: str) -> Mapping[str, torch.Tensor]:
    names = prompt.images[0].tensors.keys() if prompt.images else ()
    try:
        return {
            name: _join([image.tensors[name] for image in prompt.images], _dimension(model_type, name))
            for name in names
        }
    except (RuntimeError, KeyError, IndexError) as error:
        raise InputError(f"the images of this prompt can not be given to the model together: {error}") from error


def _dimension(model_type: str, name: str) -> int:
    if model_type in _LAST and name == "pixel_values":
        return 3
    return 1 if model_type in _SECOND else 0


def _join(tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Concatenated along `dim`, every other dimension padded with zeros at its end to the largest, as processors do."""
    sizes = [max(tensor.shape[d] for tensor in tensors) for d in range(tensors[0].dim())]
    padded = []
    for tensor in tensors:
        missing = [0 if d == dim else size - tensor.shape[d] for d, size in enumerate(sizes)]
        padded.append(F.pad(tensor, [pad for amount in reversed(missing) for pad in (0, amount)]))
    return torch.cat(padded, dim=dim)
