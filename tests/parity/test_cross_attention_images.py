"""Mllama, whose images stand beside the prompt: pictures and words in, the tokens of transformers out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image

from fixtures.tiny_models.families import FAMILIES
from fixtures.tiny_models.family import randomise
from fixtures.tiny_models.shrink import tiny_config
from fixtures.tiny_processors.builders import build
from fixtures.tiny_processors.matched import matched
from mmserve import MMPipeline


def _picture(width: int, height: int, seed: int) -> Image.Image:
    values = numpy.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=numpy.uint8)
    return Image.fromarray(values)


def _folder(folder: Path) -> tuple[Any, Any]:
    """Write a tiny model and its processor; return both as transformers has them."""
    from transformers import AutoModelForImageTextToText

    recipe, overrides = matched("mllama")
    processor = build("mllama", recipe)
    config = tiny_config("mllama", {**FAMILIES["mllama"].config, **overrides})
    config.text_config.vocab_size = len(processor.tokenizer)
    config.image_token_index = processor.image_token_id
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    randomise(model, 0)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model, processor


def test_none_one_and_several_images_answer_as_transformers(tmp_path: Path) -> None:
    model, processor = _folder(tmp_path)
    one, two = _picture(64, 48, 1), _picture(20, 90, 2)
    image, text = {"type": "image"}, {"type": "text", "text": "What?"}
    asked = {"max_tokens": 6, "ignore_eos": True}
    chats: list[list[dict[str, Any]]] = [
        [text],
        [{**image, "image": one}, text],
        [{**image, "image": one}, {**image, "image": two}, text],
        [text, {**image, "image": two}, text, {**image, "image": one}, text],
    ]
    answers = []
    with MMPipeline(tmp_path, dtype="float32", device="cpu", num_blocks=64) as pipe:
        for content in chats:
            turn = [{"role": "user", "content": content}]
            inputs = processor.apply_chat_template(
                turn, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
            )
            ids = model.generate(**inputs, max_new_tokens=6, do_sample=False, eos_token_id=None)
            answers.append(pipe.chat(turn, temperature=0, **asked))
            assert list(answers[-1].token_ids) == ids[0, inputs["input_ids"].shape[1] :].tolist()
            assert answers[-1].usage.prompt_tokens == inputs["input_ids"].shape[1]
    assert [answer.usage.image_tokens for answer in answers] == [0, 1, 2, 2]
