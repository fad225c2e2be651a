"""Fuyu, whose one image stands in front and whose patches are rows of numbers: the tokens of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image

from fixtures.tiny_models.family import randomise
from fixtures.tiny_models.shrink import tiny_config
from fixtures.tiny_processors.builders import build
from fixtures.tiny_processors.matched import matched
from mmserve import MMPipeline
from processors import PromptProcessor

_PATCHES = {"return_legacy_image_output": False}


def _picture(width: int, height: int) -> Image.Image:
    values = numpy.random.default_rng(3).integers(0, 256, (height, width, 3), dtype=numpy.uint8)
    return Image.fromarray(values)


def _folder(folder: Path) -> tuple[Any, Any]:
    """Write a tiny model and its processor; return both as transformers has them."""
    from transformers import AutoModelForImageTextToText

    recipe, overrides = matched("fuyu")
    processor = build("fuyu", recipe)
    config = tiny_config("fuyu", overrides)
    config.text_config.vocab_size = len(processor.tokenizer)
    config.image_token_id = PromptProcessor.from_processor(build("fuyu", recipe)).image_token_id
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    randomise(model, 0)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model, processor


def test_pictures_of_any_size_and_none_answer_as_transformers(tmp_path: Path) -> None:
    model, processor = _folder(tmp_path)
    sizes = (None, (97, 61), (1, 1), (640, 480), (20, 200))
    asked = [("What is it?", [] if size is None else [_picture(*size)]) for size in sizes]
    expected = []
    for text, images in asked:
        inputs = processor(text=[text], images=[images] if images else None, return_tensors="pt", **_PATCHES)
        ids = model.generate(**inputs, max_new_tokens=6, do_sample=False, eos_token_id=None)
        expected.append((inputs["input_ids"].shape[1], ids[0, inputs["input_ids"].shape[1] :].tolist()))
    settings = {"max_tokens": 6, "ignore_eos": True, "temperature": 0}
    # Steps of 24 tokens: every larger image is cut, some in the middle of a row of patches.
    with MMPipeline(tmp_path, dtype="float32", device="cpu", num_blocks=128, max_num_batched_tokens=24) as pipe:
        assert pipe.describe()["path"] == "paged"
        for _ in ("cold", "from the caches"):
            requests = [{"prompt": text, "images": images, "sampling": settings} for text, images in asked]
            answers = pipe.generate_batch(requests)
            assert [(a.usage.prompt_tokens, list(a.token_ids)) for a in answers] == expected
