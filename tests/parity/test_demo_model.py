"""The promise: the demo model answers with exactly the ids of transformers' `generate()`, in float32."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from mmserve import MMPipeline
from mmserve.demo import demo_model_folder
from mmserve.demo.pictures import Shape, draw_shapes, draw_text

PICTURES = (
    draw_shapes((Shape("star", "yellow", "top left"), Shape("circle", "blue", "right")), 240, 200, "#cccccc"),
    draw_shapes((Shape("cross", "red", "center", 0.9),), 300, 100),
    draw_text("MM42", "purple", 30, (90, 64)),
)
PROMPTS = ("Describe the image.", "Which image has a cross?", "What does it say?", "Where is the star?")
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def pipe() -> Iterator[MMPipeline]:
    with MMPipeline(dtype="float32") as pipe:
        yield pipe


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


class Oracle:
    """Plain transformers on the same folder."""

    def __init__(self) -> None:
        folder = demo_model_folder()
        self._processor = AutoProcessor.from_pretrained(folder)
        self._model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()

    def __call__(self, pictures: tuple[Image.Image, ...], prompt: str) -> tuple[tuple[int, ...], list[float]]:
        """Ids generated greedily, and the log-probability of each."""
        content = [*({"type": "image", "image": picture} for picture in pictures), {"type": "text", "text": prompt}]
        inputs = self._processor.apply_chat_template(
            [{"role": "user", "content": content}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        with torch.inference_mode():
            out = self._model.generate(
                **inputs, max_new_tokens=NEW_TOKENS, do_sample=False, output_logits=True, return_dict_in_generate=True
            )
        ids = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        steps = [step[0].float().log_softmax(-1)[token].item() for step, token in zip(out.logits, ids, strict=True)]
        return tuple(ids), steps


@pytest.mark.parametrize("count", [0, 1, 2, 3])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_same_ids_and_logprobs(pipe: MMPipeline, oracle: Oracle, prompt: str, count: int) -> None:
    expected, logprobs = oracle(PICTURES[:count], prompt)
    answer = pipe.generate(PICTURES[:count], prompt, max_tokens=NEW_TOKENS, logprobs=0)
    assert answer.token_ids == expected
    assert [entry.chosen.logprob for entry in answer.logprobs or ()] == pytest.approx(logprobs, abs=1e-4)


def test_all_at_once_and_again_from_the_caches(pipe: MMPipeline, oracle: Oracle) -> None:
    """Neither the company in a batch nor a warm cache changes an answer."""
    asked = [(PICTURES[:count], prompt) for prompt in PROMPTS for count in (1, 2, 3)]
    expected = [oracle(*request)[0] for request in asked]
    requests = [{"images": images, "prompt": p, "sampling": {"max_tokens": NEW_TOKENS}} for images, p in asked]
    for _ in range(2):
        answers = pipe.generate_batch(requests)
        assert [answer.token_ids for answer in answers] == expected
    assert all(answer.usage.cached_tokens > 0 for answer in answers)
