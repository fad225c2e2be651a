"""Who waits for an answer hears of it, or of its deadline, even while the engine's thread is in somebody's own code."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from mmserve.batching import BatchRun
from mmserve.config import EngineConfig
from mmserve.engine.core import Engine, RequestHandle
from mmserve.errors import DeadlineExceeded, EngineDeadError, InvalidRequestError, PipelineClosedError, RequestError
from mmserve.testing import ByteTokenizer, MockModel, mock_prompt
from mmserve.types import SamplingParams

WAIT = 300
"""Seconds after which a test gives up."""

SHORT = SamplingParams(max_tokens=2)


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = make()
    yield engine
    engine.close()


def make(model: MockModel | None = None) -> Engine:
    return Engine(model or MockModel(), ByteTokenizer(), EngineConfig(block_size=4, num_blocks=64), identity="mock")


async def collect(handle: RequestHandle) -> list[object]:
    return [delta async for delta in handle]


def in_a_batch(handle: RequestHandle) -> object:
    begun: Future[RequestHandle] = Future()
    begun.set_result(handle)
    return BatchRun([handle], lambda _: begun, 1, "raise").run(lambda: None)


WAITS: dict[str, Callable[[RequestHandle], object]] = {
    "result": RequestHandle.result,
    "result with a limit": lambda handle: handle.result(WAIT),
    "iteration": list,
    "await": lambda handle: asyncio.run(handle.aresult()),
    "async for": lambda handle: asyncio.run(collect(handle)),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_the_engines_own_thread_can_not_wait_for_itself(
    engine: Engine, wait: Callable[[RequestHandle], object]
) -> None:
    other = engine.submit(mock_prompt([66]), SamplingParams(max_tokens=30))

    def asks(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        wait(engine.submit(mock_prompt([65]), SHORT))
        return scores

    asking = engine.submit(mock_prompt([65]), SHORT, logits_processors=[asks])
    with pytest.raises(
        RequestError, match="a logits processor failed: InvalidRequestError: the engine's thread"
    ) as caught:
        asking.result(WAIT)
    assert isinstance(caught.value.__cause__, InvalidRequestError)
    assert len(other.result(WAIT).token_ids) == 30


def test_an_answer_that_is_there_is_no_wait_and_another_engine_may_be_asked(engine: Engine) -> None:
    done = engine.submit(mock_prompt([65]), SHORT)
    done.result(WAIT)
    second = make()

    def asks(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert done.result().token_ids == second.submit(mock_prompt([65]), SHORT).result(WAIT).token_ids
        return scores

    assert engine.submit(mock_prompt([65]), SHORT, logits_processors=[asks]).result(WAIT)
    second.close()


@pytest.mark.parametrize("wait", [*WAITS.values(), in_a_batch], ids=[*WAITS, "batch"])
def test_a_deadline_is_kept_though_the_engine_hangs(engine: Engine, wait: Callable[[RequestHandle], object]) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def hangs(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        inside.set()
        assert go_on.wait(WAIT)
        return scores

    hanging = engine.submit(mock_prompt([65]), SHORT, timeout=0.5, logits_processors=[hangs])
    assert inside.wait(WAIT)
    try:
        with ThreadPoolExecutor(2) as threads:
            handles = [hanging, engine.submit(mock_prompt([66]), SHORT, timeout=0.05)]
            for waiting in [threads.submit(wait, handle) for handle in handles]:
                with pytest.raises(DeadlineExceeded, match="did not finish in its time"):
                    waiting.result(WAIT)
        with pytest.raises(TimeoutError):
            engine.submit(mock_prompt([67]), SHORT, request_id="late").result(0.01)  # no deadline: it only waits
    finally:
        go_on.set()
    # What came too late changes nothing any more, and the engine goes on.
    assert engine.submit(mock_prompt([65]), SHORT).result(WAIT)
    for handle in handles:
        with pytest.raises(DeadlineExceeded):
            handle.result(WAIT)
        assert not list(handle._deltas)


def test_whatever_a_processor_raises_fails_its_request_alone(engine: Engine) -> None:
    for error in (KeyboardInterrupt, GeneratorExit, SystemExit, MemoryError, StopIteration):

        def raises(_: torch.Tensor, scores: torch.Tensor, error: type[BaseException] = error) -> torch.Tensor:
            raise error

        with pytest.raises(RequestError, match=error.__name__):
            engine.submit(mock_prompt([65]), SHORT, logits_processors=[raises]).result(WAIT)
    assert engine.submit(mock_prompt([65]), SHORT).result(WAIT)


@pytest.mark.parametrize("value", [[], {}, None, 1, b"id", 1.5, ("id",)])
def test_what_is_no_id_can_not_be_aborted(engine: Engine, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"a request's id is a string, not a {type(value).__name__}"):
        engine.abort(value)


def test_the_numbers_of_a_dead_and_of_a_closed_engine_are_true() -> None:
    for model, state in (
        (MockModel(dies_on={90}, forward_seconds=0.01), "dead"),
        (MockModel(forward_seconds=0.01), "closed"),
    ):
        engine = make(model)
        long = SamplingParams(max_tokens=100)
        handles = [engine.submit(mock_prompt([65]), long) for _ in range(3)]
        next(iter_of_first := iter(handles[0]))
        assert engine.stats()["state"] == "alive"
        assert engine.stats()["running"] > 0
        if state == "dead":
            engine.submit(mock_prompt([90]), long)
        else:
            engine.close()
        for handle in handles:
            with pytest.raises((EngineDeadError, PipelineClosedError)):
                handle.result(WAIT)
        engine.close()
        stats = engine.stats()
        assert stats["state"] == state
        assert [stats[name] for name in ("waiting", "running", "blocks_held", "tokens_per_second")] == [0, 0, 0, 0]
        assert stats["failed"] == 3 + (state == "dead")
        with pytest.raises((EngineDeadError, PipelineClosedError)):
            list(iter_of_first)
