"""Rows made by the model's own `get_image_features` give the ids and log-probabilities of the picture itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

from fixtures.tiny_models.families import FAMILIES as TINY
from fixtures.tiny_models.family import randomise
from fixtures.tiny_models.shrink import tiny_config
from fixtures.tiny_processors.builders import build
from fixtures.tiny_processors.matched import matched
from mmserve import MMPipeline
from mmserve.errors import InputError
from processors import ImageFeatures, PromptProcessor

FAMILIES = ["gemma3", "idefics3", "llava", "mistral3", "qwen2_vl", "qwen3_vl"]


def _picture(width: int, height: int, seed: int) -> Image.Image:
    values = numpy.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=numpy.uint8)
    return Image.fromarray(values)


def _folder(family: str, folder: Path) -> tuple[Path, Any]:
    """A folder with a tiny model and its processor, and the plain model."""
    from transformers import AutoModelForImageTextToText

    recipe, overrides = matched(family)
    processor = build(family, recipe)
    config = tiny_config(family, {**TINY[family].config, **overrides})
    config.get_text_config().vocab_size = len(processor.tokenizer)
    processor.save_pretrained(folder)
    token = PromptProcessor.from_processor(processor).image_token_id
    for name in ("image_token_id", "image_token_index"):
        if hasattr(config, name):
            setattr(config, name, token)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    randomise(model, 0)
    model.save_pretrained(folder)
    return folder, model


def _features(pipe: MMPipeline, model: Any, picture: Image.Image) -> ImageFeatures:
    item = pipe.prepare((picture, "x")).images[0]
    with torch.inference_mode():
        return ImageFeatures.of(model.model.get_image_features(**item.tensors, return_dict=True), item.size)


@pytest.mark.parametrize("family", FAMILIES)
def test_features_answer_as_their_picture(family: str, tmp_path: Path) -> None:
    folder, model = _folder(family, tmp_path)
    one, two = _picture(64, 48, 1), _picture(40, 90, 2)
    with MMPipeline(folder, dtype="float32", device="cpu", num_blocks=256) as pipe:
        assert pipe.describe()["path"] == "paged"
        first, second = (_features(pipe, model, picture) for picture in (one, two))
        asked = {"max_tokens": 5, "ignore_eos": True, "logprobs": 0}
        expected = pipe.generate([one, two], "What?", **asked)
        for given in ([first, second], [one, second], [first, two]):
            answer = pipe.generate(given, "What?", **asked)
            assert answer.token_ids == expected.token_ids
            assert answer.usage.image_tokens == expected.usage.image_tokens
            for ours, theirs in zip(answer.logprobs or (), expected.logprobs or (), strict=True):
                assert abs(ours.chosen.logprob - theirs.chosen.logprob) < 1e-4
        swapped = pipe.generate([second, first], "What?", **asked)
        other = pipe.generate([two, one], "What?", **asked)
        assert swapped.token_ids == other.token_ids
        turn = [{"type": "text", "text": "Look:"}, {"type": "image", "image": first}]
        plain = [{"type": "text", "text": "Look:"}, {"type": "image", "image": one}]
        chats = [pipe.chat([{"role": "user", "content": content}], **asked) for content in (turn, plain)]
        assert chats[0].token_ids == chats[1].token_ids
        for wrong, message in (
            (ImageFeatures(first.rows[:-1], first.size), "rows, but a picture of 64x48 takes"),
            (ImageFeatures(first.rows[:, 1:], first.size), "wide"),
            (ImageFeatures(torch.full_like(first.rows, torch.nan), first.size), "not finite"),
        ):
            with pytest.raises(InputError, match=message):
                pipe.generate(wrong, "What?", **asked)
        if first.deepstack is not None:
            with pytest.raises(InputError, match="DeepStack rows for 0 layers, the model takes them for 2"):
                pipe.generate(ImageFeatures(second.rows, second.size), "What?", **asked)
        assert pipe.generate([one, two], "What?", **asked).token_ids == expected.token_ids
