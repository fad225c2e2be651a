"""The line of prompts with pictures: bounded in bytes, one always ahead, nobody forgotten."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from mmserve import MMPipeline, pipeline
from mmserve.engine.handle import RequestHandle
from mmserve.errors import PipelineClosedError, RequestAborted
from mmserve.lookahead import Lookahead, Prepared

WAIT = 60


class ByHand(Executor):
    """Runs what it is given when it is told to."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], object]] = []

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.jobs.append(lambda: call(*args, **kwargs))
        return Future()

    def run(self) -> None:
        self.jobs.pop(0)()


class Line:
    """A `Lookahead` with two threads over requests whose pictures take 10 bytes each."""

    def __init__(self, limit: int) -> None:
        self.executor = ByHand()
        self.ahead = Lookahead(self.executor, 2, limit)
        self.prepared: list[RequestHandle] = []

    def ask(self, name: str, priority: int = 0, nbytes: int = 10) -> Future[RequestHandle]:
        def prepare() -> Prepared:
            handle = RequestHandle(name, lambda _: None)
            self.prepared.append(handle)
            return Prepared(handle, nbytes)

        return self.ahead.submit(name, priority, prepare)

    def run_all(self) -> list[str]:
        """Prepare as long as there is room; who is prepared by now."""
        while self.executor.jobs:
            self.executor.run()
        return [handle.request_id for handle in self.prepared]


@pytest.mark.parametrize(("limit", "ahead"), [(0, 1), (9, 1), (10, 1), (25, 2), (40, 4), (1000, 8)])
def test_no_more_bytes_wait_than_the_limit_and_never_less_than_one(limit: int, ahead: int) -> None:
    line = Line(limit)
    begun = [line.ask(str(number)) for number in range(8)]
    line.executor.run()  # the first one tells what they take
    assert len(line.run_all()) == ahead
    for number in range(8):
        line.prepared[number].begin()
        assert len(line.run_all()) == min(8, ahead + number + 1)
    assert all(future.done() for future in begun)


def test_a_request_that_ends_before_it_begins_makes_room_too() -> None:
    line = Line(10)
    line.ask("a")
    line.ask("b")
    assert line.run_all() == ["a"]
    line.prepared[0].fail(RequestAborted("a"))
    line.prepared[0].begin()  # does not count twice
    line.ask("c")
    assert line.run_all() == ["a", "b"]


def test_what_takes_nothing_new_does_not_wait() -> None:
    line = Line(10)
    for number in range(5):
        line.ask(str(number), nbytes=0)
    assert len(line.run_all()) == 5


def test_a_failure_makes_room_and_the_first_in_priority_comes_next() -> None:
    line = Line(10)

    def fail() -> Prepared:
        raise ValueError("no picture")

    failed = line.ahead.submit("bad", 0, fail)
    line.ask("later")
    line.ask("sooner", priority=-1)
    line.executor.run()
    assert isinstance(failed.exception(), ValueError)
    assert line.run_all() == ["sooner"]


def test_who_is_cancelled_dropped_or_closed_upon_leaves_the_line() -> None:
    line = Line(10)
    first, cancelled, dropped, waiting = (line.ask(name) for name in "abcd")
    assert line.run_all() == ["a"]
    assert cancelled.cancel()
    assert line.ahead.drop("c", RequestAborted("c"))
    assert not line.ahead.drop("a", RequestAborted("a"))
    line.ahead.close(PipelineClosedError("closed"))
    line.prepared[0].begin()
    assert line.run_all() == ["a"]
    assert first.result().request_id == "a"
    with pytest.raises(CancelledError):
        cancelled.result()
    assert isinstance(dropped.exception(), RequestAborted)
    assert isinstance(waiting.exception(), PipelineClosedError)
    with pytest.raises(PipelineClosedError):
        line.ask("e")


def test_an_executor_that_was_shut_down_fails_the_request() -> None:
    executor = ThreadPoolExecutor(1)
    executor.shutdown()
    ahead = Lookahead(executor, 1, 10)
    assert isinstance(ahead.submit("a", 0, lambda: pytest.fail("ran")).exception(), RuntimeError)


@pytest.fixture
def narrow() -> Iterator[MMPipeline]:
    with MMPipeline(dtype="float32", num_blocks=128, prepared_memory=0, processor_cache_memory=0) as pipe:
        yield pipe


def _pictures(count: int) -> list[np.ndarray[Any, Any]]:
    random = np.random.default_rng(0)
    return [random.integers(0, 256, (48, 64, 3), dtype=np.uint8) for _ in range(count)]


def test_a_pipeline_with_room_for_one_answers_all_the_same(narrow: MMPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = _pictures(6)
    expected = [narrow.generate(picture, "What is it?", max_tokens=4).token_ids for picture in pictures]
    waiting: list[int] = []
    own = pipeline.process_request

    def process(*args: Any) -> Any:
        waiting.append(narrow._lookahead._num_ready)
        return own(*args)

    monkeypatch.setattr(pipeline, "process_request", process)
    outputs = narrow.generate_batch(
        [{"prompt": "What is it?", "images": picture, "sampling": {"max_tokens": 4}} for picture in pictures]
    )
    assert [output.token_ids for output in outputs] == expected  # type: ignore[union-attr]
    assert len(waiting) == 6
    assert max(waiting) == 0
    assert narrow._lookahead._held == 0
