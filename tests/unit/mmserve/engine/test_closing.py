"""`close()`: nothing hangs, no thread is left, and whoever still knows the engine keeps no memory with it."""

from __future__ import annotations

import asyncio
import gc
import threading
import traceback
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from PIL import Image

from mmserve import MMPipeline, pipeline
from mmserve.config import EngineConfig
from mmserve.engine.core import Engine
from mmserve.errors import (
    EngineDeadError,
    InputError,
    MMServeError,
    PipelineClosedError,
    RequestAborted,
    RequestError,
)
from mmserve.testing import ByteTokenizer, MockModel, mock_image, mock_prompt
from mmserve.types import SamplingParams

WAIT = 300
"""Seconds after which a test gives up."""

ENDLESS = SamplingParams(max_tokens=5000, ignore_eos=True)


def make(model: MockModel | None = None, **options: Any) -> Engine:
    config = EngineConfig(**{"block_size": 4, "num_blocks": 4096, "max_num_batched_tokens": 32} | options)
    return Engine(model or MockModel(), ByteTokenizer(), config, identity="mock")


def caches_of(engine: Engine) -> list[weakref.ref[Any]]:
    return [weakref.ref(cache.key.untyped_storage()) for cache in engine._runner._caches]


def test_a_closed_engine_that_is_still_known_keeps_no_cache() -> None:
    model = MockModel()
    engine = make(model)
    prompt = mock_prompt([65] * 20, [mock_image(2, 6)])
    engine.submit(prompt, SamplingParams(max_tokens=3)).result(WAIT)
    stream = engine.submit(prompt, ENDLESS)
    next(iter(stream))
    tensors = caches_of(engine)
    assert engine._runner.image_keys
    engine.close()
    engine.close()
    gc.collect()
    assert [tensor() for tensor in tensors] == [None] * len(tensors)
    assert not engine._runner.image_keys
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    with pytest.raises(PipelineClosedError):
        engine.submit(prompt)
    assert engine.describe()["num_blocks"] == 4096
    assert engine.stats()["state"] == "closed"


def test_closing_an_engine_leaves_the_cache_of_a_later_one_on_the_same_model() -> None:
    model = MockModel()
    first, prompt = make(model), mock_prompt([65, 66, 67])
    expected = first.submit(prompt, SamplingParams(max_tokens=6)).result(WAIT).token_ids
    second = make(model)
    first.close()
    assert second.submit(prompt, SamplingParams(max_tokens=6)).result(WAIT).token_ids == expected
    second.close()
    assert not model._caches


def test_a_closed_pipeline_that_is_still_known_keeps_neither_weights_nor_cache() -> None:
    pipe = MMPipeline(dtype="float32", num_blocks=32)
    picture = Image.new("RGB", (48, 48), "red")
    pipe.generate(picture, "What is it?", max_tokens=2)
    described = pipe.describe()
    assert pipe._model is not None
    weight = next(iter(pipe._model._model.parameters()))  # type: ignore[attr-defined]
    held = [weakref.ref(weight), *caches_of(pipe._engine)]
    del weight
    pipe.close()
    gc.collect()
    assert [tensor() for tensor in held] == [None] * len(held)
    assert pipe.describe()["folder"] == described["folder"]
    assert pipe.describe()["class"] == described["class"]
    with pytest.raises(PipelineClosedError):
        pipe.generate(picture, "What is it?")


@pytest.mark.parametrize("closes_on_a_loop", [False, True])
def test_closing_amid_streams_on_two_event_loops_and_threads(closes_on_a_loop: bool) -> None:
    """All have their first delta when the engine is closed, so all are in the middle; each hears of it."""
    before = set(threading.enumerate())
    engine = make(max_num_seqs=16)
    amid = threading.Barrier(5)

    async def watch(number: int, seen: asyncio.Queue[int]) -> str:
        try:
            async for _ in engine.submit(mock_prompt([65 + number]), ENDLESS):
                seen.put_nowait(number)
        except MMServeError as error:
            return type(error).__name__
        return "answered"

    async def crowd(first: int, closes: bool) -> list[str]:
        queues: list[asyncio.Queue[int]] = [asyncio.Queue() for _ in range(4)]
        tasks = [asyncio.create_task(watch(first + i, seen)) for i, seen in enumerate(queues)]
        for seen in queues:
            await seen.get()
        await asyncio.to_thread(amid.wait, WAIT)
        if closes:
            engine.close()
        return await asyncio.wait_for(asyncio.gather(*tasks), WAIT)

    def listen(number: int) -> list[str]:
        deltas = iter(engine.submit(mock_prompt([75 + number]), ENDLESS))
        next(deltas)
        amid.wait(WAIT)
        with pytest.raises(PipelineClosedError):
            list(deltas)
        return ["PipelineClosedError"]

    with ThreadPoolExecutor(4) as threads:
        loops = [threads.submit(asyncio.run, crowd(4 * i, closes_on_a_loop and i == 0)) for i in range(2)]
        asked = [*loops, *(threads.submit(listen, i) for i in range(2))]
        amid.wait(WAIT)
        engine.close()
        heard = [name for future in asked for name in future.result(WAIT)]
    assert heard == ["PipelineClosedError"] * 10
    assert set(threading.enumerate()) <= before
    engine.check_integrity()
    assert engine.stats()["blocks_held"] == 0


def test_closing_a_pipeline_amid_everything_from_two_threads_at_once() -> None:
    before = set(threading.enumerate())
    pipe = MMPipeline(dtype="float32", num_blocks=256, max_num_seqs=4, preprocess_threads=2)
    picture = Image.new("RGB", (48, 48), "red")
    options: dict[str, Any] = {"max_tokens": 500, "ignore_eos": True}
    heard: list[str] = []

    async def watch() -> None:
        try:
            async for _ in pipe.astream(picture, "What?", **options):
                pass
        except (PipelineClosedError, RequestAborted) as error:
            heard.append(type(error).__name__)

    async def crowd() -> None:
        await asyncio.wait_for(asyncio.gather(*(watch() for _ in range(5))), WAIT)

    def batch() -> None:
        with pytest.raises((PipelineClosedError, RequestAborted)):
            pipe.generate_batch([{"prompt": "Hello?", "sampling": options}] * 9)

    stream = pipe.stream(picture, "What?", **options)
    next(stream)
    with ThreadPoolExecutor(5) as threads:
        asked = [threads.submit(asyncio.run, crowd()) for _ in range(2)] + [threads.submit(batch)]
        closing = [threads.submit(pipe.close) for _ in range(2)]
        for future in (*closing, *asked):
            future.result(WAIT)
    pipe.close()
    assert len(heard) == 10
    with pytest.raises(PipelineClosedError):
        list(stream)
    assert set(threading.enumerate()) <= before


def test_an_error_that_is_kept_keeps_no_tensor_of_its_step() -> None:
    """`generate_batch(on_error="return")` keeps every error; a step's logits are large."""
    seen: list[weakref.ref[torch.Tensor]] = []

    def raises(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(weakref.ref(scores))
        try:
            raise KeyError("first")
        except KeyError as error:
            raise ValueError("mine") from error

    engine = make()
    with pytest.raises(RequestError, match="mine") as caught:
        engine.submit(mock_prompt([65]), logits_processors=[raises]).result(WAIT)
    engine.submit(mock_prompt([65]), SamplingParams(max_tokens=2)).result(WAIT)
    gc.collect()
    assert [tensor() for tensor in seen] == [None]
    assert "raises" in "".join(traceback.format_exception(caught.value))
    engine.close()


def test_the_death_of_an_engine_keeps_neither_model_nor_cache() -> None:
    model = MockModel(dies_on=[66])
    engine = make(model)
    tensors = caches_of(engine)
    with pytest.raises(EngineDeadError) as caught:
        engine.submit(mock_prompt([66])).result(WAIT)
    engine.close()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert [tensor() for tensor in tensors] == [None] * len(tensors)
    assert gone() is None
    assert "told to die" in "".join(traceback.format_exception(caught.value))


def test_the_error_of_a_picture_that_can_not_be_processed_keeps_no_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[weakref.ref[torch.Tensor]] = []

    def fails(*_: Any) -> Any:
        pixels = torch.zeros(1000)
        seen.append(weakref.ref(pixels))
        raise InputError("no such picture")

    monkeypatch.setattr(pipeline, "process_request", fails)
    with MMPipeline(dtype="float32", num_blocks=32) as pipe:
        errors = pipe.generate_batch([(None, "Hello?")] * 3, on_error="return")
        gc.collect()
        assert [str(error) for error in errors] == ["no such picture"] * 3
        assert [pixels() for pixels in seen] == [None] * 3
