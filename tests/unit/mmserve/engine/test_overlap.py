"""Preprocessing and steps overlap; told by events that would wait for ever if one had to end before the other began."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from PIL import Image

from mmserve import MMPipeline, pipeline
from mmserve.types import GenerationOutput, GenerationRequest, SamplingParams

WAIT = 300
"""Seconds after which a test gives up."""

TWO = SamplingParams(max_tokens=2, ignore_eos=True)


@pytest.fixture(scope="module")
def pipe() -> Iterator[MMPipeline]:
    with MMPipeline(dtype="float32", num_blocks=64) as pipe:
        yield pipe


def test_a_picture_is_processed_while_a_step_runs(pipe: MMPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step ends after the second request's picture is ready."""
    in_step, processed = threading.Event(), threading.Event()
    original = pipeline.process_request

    def seen(processor: Any, request: GenerationRequest) -> Any:
        prompt = original(processor, request)
        if request.images:
            processed.set()
        return prompt

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        in_step.set()
        assert processed.wait(WAIT)
        return scores

    monkeypatch.setattr(pipeline, "process_request", seen)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(pipe.generate, None, "Hello?", sampling=TWO, logits_processors=[processor])
        assert in_step.wait(WAIT)
        second = threads.submit(pipe.generate, Image.new("RGB", (64, 64), "red"), "What is it?", sampling=TWO)
        assert [len(future.result(WAIT).token_ids) for future in (first, second)] == [2, 2]


def test_steps_run_while_a_picture_is_processed(pipe: MMPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """The picture is ready after another request, begun later, has its whole answer."""
    processing, answered = threading.Event(), threading.Event()
    original = pipeline.process_request

    def slow(processor: Any, request: GenerationRequest) -> Any:
        if request.images:
            processing.set()
            assert answered.wait(WAIT)
        return original(processor, request)

    monkeypatch.setattr(pipeline, "process_request", slow)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(pipe.generate, Image.new("RGB", (64, 64), "blue"), "What is it?", max_tokens=2)
        assert processing.wait(WAIT)
        assert len(pipe.generate(None, "Hello?", max_tokens=5, ignore_eos=True).token_ids) == 5
        assert not first.done()
        answered.set()
        assert first.result(WAIT).token_ids


def test_a_batch_keeps_processing_while_it_steps(pipe: MMPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first request's last token waits for the processing of the last request in the window."""
    last_processed = threading.Event()
    original = pipeline.process_request

    def seen(processor: Any, request: GenerationRequest) -> Any:
        prompt = original(processor, request)
        if request.request_id == "last":
            last_processed.set()
        return prompt

    def waits(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert last_processed.wait(WAIT)
        return scores

    monkeypatch.setattr(pipeline, "process_request", seen)
    names = ["first", *(f"between {i}" for i in range(6)), "last"]
    requests = [
        GenerationRequest(
            prompt="Hello?", request_id=name, sampling=TWO, logits_processors=[waits] if name == "first" else []
        )
        for name in names
    ]
    answers = pipe.generate_batch(requests)
    assert [answer.request_id for answer in answers if isinstance(answer, GenerationOutput)] == names
