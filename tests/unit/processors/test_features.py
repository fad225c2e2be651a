"""The rows that a range takes are the rows that the family's own vision tower makes, for every size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pictures import noise

from processors import ImageFeatures, PromptProcessor

SIZES = [(28, 28), (97, 61), (61, 97), (200, 20), (20, 200), (128, 64), (50, 60), (33, 31)]
MANY_SIZES = [(w, h) for w in (1, 8, 29, 50, 60) for h in (1, 15, 29, 43, 60)] + [(999, 10), (10, 999)]
"""For families whose rows follow from several roundings, of tiles and of what is cut off from them again."""
FAMILIES = [
    "fuyu", "gemma3", "idefics2", "idefics3", "internvl", "llava", "llava_next", "llava_onevision", "mistral3",
    "qwen2_vl", "qwen3_vl", "smolvlm",
]  # fmt: skip


def _model(family: str, overrides: Any, processor: PromptProcessor) -> Any:
    """A tiny model with the processor's vocabulary; random weights."""
    from transformers import AutoModelForImageTextToText

    from fixtures.tiny_models.shrink import tiny_config

    config = tiny_config(family, overrides)
    config.get_text_config().vocab_size = len(processor.tokenizer)
    for name in ("image_token_id", "image_token_index"):
        if hasattr(config, name):
            setattr(config, name, processor.image_token_id)
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()


def _rows(features: Any, width: int) -> int:
    parts = features if isinstance(features, (list, tuple)) else [features]
    return sum(part.numel() // width for part in parts)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_equal_features(builders: Any, family: str) -> None:
    from fixtures.tiny_processors.matched import matched

    recipe, overrides = matched(family)
    processor = PromptProcessor.from_processor(builders.build(family, recipe))
    model = _model(family, overrides, processor)
    width = model.config.get_text_config().hidden_size
    for seed, size in enumerate(SIZES + (MANY_SIZES if family == "llava_next" else [])):
        one, other = noise(*size, seed), noise(*size[::-1], seed)
        for pictures in ([one],) if family == "fuyu" else ([one], [one, other]):
            for image in processor.process("x", pictures).images:
                with torch.inference_mode():
                    output = model.model.get_image_features(**image.tensors, return_dict=True)
                made = output.pooler_output if output.get("pooler_output") is not None else output.last_hidden_state
                assert _rows(made, width) == image.range.num_embeds, (size, len(pictures))
                assert ImageFeatures.of(output, image.size).rows.shape == (image.range.num_embeds, width)
