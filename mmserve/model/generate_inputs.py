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

_SECOND: Final = ("idefics", "idefics2", "idefics3", "smolvlm", "mllama", "perception_lm")
_LAST: Final = ("minicpm_ocr", "minicpmv4_6", "minicpmv4_7")
"""Families that join the images of one prompt along another dimension than the first: all tensors along the second,
or the pixels, which are one row of patches, along the last."""
_TYPES: Final = {"mm_token_type_ids", "moe_mm_token_type_ids"}
_TYPED_PROMPTS: Final[dict[str, bool]] = {"gemma3": True, "shieldgemma2": True, "paligemma": False}
"""Families that read `token_type_ids`, and whether they are 1 at an image; PaliGemma's prompt is all prefix, 0."""
_INDICES: Final = {"molmo2": "image_token_pooling"}
"""Tensors of indices into the patches of all images of a prompt, -1 where there is none: an image that was processed
alone counts from its own first patch."""
_LISTS: Final = {"unlimited_ocr": frozenset({"num_local_patches", "patches_grid"})}
"""Numbers that a family's forward takes as Python lists alone."""


def generate_inputs(model: Any, prompt: ProcessedPrompt) -> dict[str, Any]:
    """Ids, attention mask, the joined tensors of all images, the prompt's own tensors, and type ids if taken.

    Values are tensors on the model's device; lists where its forward takes nothing else.

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
    lists = _LISTS.get(model.config.model_type, frozenset())
    return {name: tensor.tolist() if name in lists else tensor.to(device) for name, tensor in inputs.items()}


def _joined(prompt: ProcessedPrompt, model_type: str) -> Mapping[str, torch.Tensor]:
    images = [image.tensors for image in prompt.images]
    names = images[0].keys() if images else ()
    try:
        if model_type in _INDICES:
            images = _counted_on(images, _INDICES[model_type])
        return {name: _join([tensors[name] for tensors in images], _dimension(model_type, name)) for name in names}
    except (RuntimeError, KeyError, IndexError) as error:
        raise InputError(f"the images of this prompt can not be given to the model together: {error}") from error


def _counted_on(images: Sequence[Mapping[str, torch.Tensor]], name: str) -> list[Mapping[str, torch.Tensor]]:
    """The images with their indices `name` counted behind the patches of those before them."""
    first = 0
    counted: list[Mapping[str, torch.Tensor]] = []
    for tensors in images:
        indices = tensors[name]
        counted.append({**tensors, name: torch.where(indices >= 0, indices + first, indices)})
        first += tensors["pixel_values"].shape[:-1].numel()
    return counted


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
