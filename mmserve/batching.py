"""Many requests at once: which are under way, which come next, what came of each.

Requests begin in order and end in any::

    answered  under way         not begun      window = 3
    0  2  3   1  4  5           6  7  8        when any of 1, 4, 5 ends, 6 begins
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from mmserve.errors import MMServeError
from mmserve.types import GenerationOutput

if TYPE_CHECKING:
    from mmserve.engine.core import RequestHandle

__all__ = ["BatchRun", "give_up"]


class BatchRun:
    """One run over a list of requests.

    Args:
        requests: All of them.
        begin: Starts one; the future of its handle, or of why there is none.
        window: Most under way at a time.
        on_error: "raise" or "return".
    """

    def __init__(
        self, requests: Sequence[Any], begin: Callable[[Any], Future[RequestHandle]], window: int, on_error: str
    ) -> None:
        self._requests = requests
        self._begin = begin
        self._window = window
        self._stop_at_error = on_error == "raise"
        self._under_way: dict[int, Future[RequestHandle]] = {}
        self._ended: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # None: look at the deadlines again
        self._results: dict[int, GenerationOutput | MMServeError] = {}
        self._num_begun = 0
        self._stop = len(requests)  # no request from here on matters any more

    def run(self, tick: Callable[[], object]) -> list[GenerationOutput | MMServeError]:
        """Results in the order of the requests; `tick` is called for each.

        Raises:
            MMServeError: That of the first request in order that failed, if errors are to be raised.
            BaseException: Whatever interrupts it; nothing is left under way.
        """
        try:
            self._refill()
            while any(index < self._stop for index in self._under_way):
                self._take(self._next_ended())
                self._refill()
                tick()
        finally:
            for begun in self._under_way.values():
                give_up(begun)
        if self._stop < len(self._requests):
            error = self._results[self._stop]
            assert isinstance(error, MMServeError)
            raise error
        return [self._results[index] for index in range(len(self._requests))]

    def _refill(self) -> None:
        while self._num_begun < self._stop and len(self._under_way) < self._window:
            index, self._num_begun = self._num_begun, self._num_begun + 1
            self._under_way[index] = begun = self._begin(self._requests[index])
            begun.add_done_callback(lambda begun, index=index: self._on_begun(index, begun))  # type: ignore[misc]

    def _on_begun(self, index: int, begun: Future[RequestHandle]) -> None:
        """In a worker's thread, or at once."""
        if begun.cancelled() or begun.exception() is not None:
            self._ended.put(index)
            return
        handle = begun.result()
        handle.add_done_callback(lambda: self._ended.put(index))
        if handle.seconds_left() is not None:
            self._ended.put(None)

    def _next_ended(self) -> int:
        """Wait for any to end. A deadline is kept here too: the engine may hang in somebody's logits processor."""
        while True:
            begun = [task for task in self._under_way.values() if task.done() and not task.cancelled()]
            handles = [task.result() for task in begun if task.exception() is None]
            left = [seconds for handle in handles if (seconds := handle.seconds_left()) is not None]
            try:
                index = self._ended.get(timeout=min(left, default=None))
            except queue.Empty:
                for handle in handles:
                    handle.expire()
                continue
            if index is not None:
                return index

    def _take(self, index: int) -> None:
        begun = self._under_way.pop(index)
        if index > self._stop:
            return
        try:
            self._results[index] = begun.result().result()
        except MMServeError as error:
            self._results[index] = error
            if self._stop_at_error:
                # Those before it may fail too, and then theirs is the error; those after it have no use any more.
                self._stop = index
                for later in [other for other in self._under_way if other > index]:
                    give_up(self._under_way[later])


def give_up(begun: Future[RequestHandle]) -> None:
    """Abort a request, wherever it is."""
    if not begun.cancel():
        begun.add_done_callback(_abort_if_begun)


def _abort_if_begun(begun: Future[RequestHandle]) -> None:
    if not begun.cancelled() and begun.exception() is None:
        begun.result().abort()
