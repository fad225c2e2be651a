"""LLaVA and its kin: what old processor files leave out is in the model's configuration.

The number of tokens of an image follows from the tower's patch size, from which of its outputs are selected, and from
whether it has a class token. Early checkpoints keep none of this in the processor's files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["complete", "complete_onevision"]


def complete(processor: Any, config: Mapping[str, object]) -> None:
    """Fill in what is missing: patch size, selection strategy, and the class token of a CLIP tower."""
    tower = _tower(config)
    if processor.patch_size is None and isinstance(tower.get("patch_size"), int):
        processor.patch_size = tower["patch_size"]
        if not processor.num_additional_image_tokens and str(tower.get("model_type", "clip")).startswith("clip"):
            processor.num_additional_image_tokens = 1
    _complete_strategy(processor, config)


def complete_onevision(processor: Any, config: Mapping[str, object]) -> None:
    """Fill in what is missing: the patches of one tile, and the selection strategy."""
    tower = _tower(config)
    size, patch = tower.get("image_size"), tower.get("patch_size")
    if processor.num_image_tokens is None and isinstance(size, int) and isinstance(patch, int):
        processor.num_image_tokens = (size // patch) ** 2
    _complete_strategy(processor, config)


def _complete_strategy(processor: Any, config: Mapping[str, object]) -> None:
    if processor.vision_feature_select_strategy is None:
        processor.vision_feature_select_strategy = config.get("vision_feature_select_strategy", "default")


def _tower(config: Mapping[str, object]) -> Mapping[str, object]:
    tower = config.get("vision_config")
    return tower if isinstance(tower, Mapping) else {}
