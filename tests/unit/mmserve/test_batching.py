"""A batch refills whenever a request ends, keeps its order, and leaves nothing under way."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from mmserve.batching import BatchRun
from mmserve.engine.handle import RequestHandle
from mmserve.errors import InputError, InvalidRequestError, MMServeError, RequestAborted
from mmserve.types import GenerationOutput, Metrics, StreamDelta, Usage


def output(text: str) -> GenerationOutput:
    usage = Usage(prompt_tokens=1, image_tokens=0, cached_tokens=0, completion_tokens=1)
    times = Metrics(preprocess=0.0, queue=0.0, encode=0.0, first_token=0.0, total=0.0)
    return GenerationOutput(text=text, token_ids=(1,), finish_reason="stop", usage=usage, metrics=times)


class Fake:
    """Begins requests named by strings; a test ends them."""

    def __init__(self) -> None:
        self.handles: dict[str, RequestHandle] = {}
        self.aborted: list[str] = []
        self.changed = threading.Condition()

    def begin(self, name: str) -> Future[RequestHandle]:
        begun: Future[RequestHandle] = Future()
        if name.startswith("bad"):
            begun.set_exception(InvalidRequestError(name))
            return begun
        with self.changed:
            self.handles[name] = RequestHandle(name, self.abort)
            self.changed.notify_all()
        begun.set_result(self.handles[name])
        return begun

    def abort(self, handle: RequestHandle) -> None:
        self.aborted.append(handle.request_id)
        handle.fail(RequestAborted(handle.request_id))

    def end(self, name: str, error: Exception | None = None) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: name in self.handles, timeout=60)
        handle = self.handles[name]
        if error is None:
            handle.finish(StreamDelta(text=name), output(name))
        else:
            handle.fail(error)


def run(fake: Fake, names: list[str], window: int, on_error: str, script: Any) -> Any:
    """The result of a run, or its error, while another thread plays `script`."""
    player = threading.Thread(target=script)
    player.start()
    ticks: list[int] = []
    try:
        return BatchRun(names, fake.begin, window, on_error).run(lambda: ticks.append(1))
    except MMServeError as error:
        return error
    finally:
        player.join(60)


def test_a_long_answer_does_not_hold_up_the_others() -> None:
    fake = Fake()

    def script() -> None:
        for name in ("b", "c", "d", "e"):  # "a" takes the longest
            fake.end(name)
        assert len(fake.handles) == 5
        fake.end("a")

    results = run(fake, list("abcde"), 2, "raise", script)
    assert [result.text for result in results] == list("abcde")
    assert fake.aborted == []


def test_no_more_are_under_way_than_the_window() -> None:
    fake = Fake()
    seen: list[int] = []

    def script() -> None:
        for name in "abcdef":
            fake.end(name)
            seen.append(sum(not handle.done for handle in fake.handles.values()))

    run(fake, list("abcdef"), 2, "raise", script)
    assert max(seen) <= 2


def test_errors_stand_in_their_places() -> None:
    fake = Fake()

    def script() -> None:
        fake.end("b", InputError("b"))
        fake.end("a")
        fake.end("c")

    results = run(fake, ["a", "b", "bad", "c"], 3, "return", script)
    assert [type(result) for result in results] == [GenerationOutput, InputError, InvalidRequestError, GenerationOutput]


def test_the_first_error_in_order_is_raised_and_what_comes_after_it_is_aborted() -> None:
    fake = Fake()

    def script() -> None:
        fake.end("d", InputError("d"))
        fake.end("b", InputError("b"))
        fake.end("a")

    error = run(fake, list("abcdefgh"), 5, "raise", script)
    assert str(error) == "b"
    assert "e" in fake.aborted
    assert all(handle.done for handle in fake.handles.values())
    assert "h" not in fake.handles


def test_an_interruption_leaves_nothing_under_way() -> None:
    fake = Fake()

    def tick() -> None:
        raise KeyboardInterrupt

    threading.Thread(target=lambda: fake.end("a")).start()
    with pytest.raises(KeyboardInterrupt):
        BatchRun(list("abc"), fake.begin, 3, "raise").run(tick)
    assert fake.aborted == ["b", "c"]


def test_nothing_asked_is_nothing_answered() -> None:
    assert BatchRun([], Fake().begin, 3, "raise").run(print) == []
