"""A request's owner's end: its deltas, its result, and the way to abort it; from any thread or event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator

from mmserve.types import GenerationOutput, StreamDelta

__all__ = ["RequestHandle"]


class RequestHandle:
    """One submitted request.

    Its deltas are handed out once: iterate it in one place, with `for` or `async for`. Leaving the loop early
    aborts the request. `result` may be asked for as well, by anyone, any number of times.

    Args:
        request_id: Unique in the engine.
        abort: Called with this handle to abort the request.
    """

    def __init__(self, request_id: str, abort: Callable[[RequestHandle], object]) -> None:
        self.request_id = request_id
        self._abort: Callable[[RequestHandle], object] | None = abort
        self._future: concurrent.futures.Future[GenerationOutput] = concurrent.futures.Future()
        self._future.set_running_or_notify_cancel()
        self._changed = threading.Condition()
        self._deltas: deque[StreamDelta] = deque()
        self._wakers: list[Callable[[], object]] = []

    # -- for the owner --------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether the result, or an error, is there."""
        return self._future.done()

    def abort(self) -> None:
        """Give the request up. `result` then raises RequestAborted, unless it was done before."""
        abort = self._abort
        if abort is not None and not self.done:
            abort(self)

    def add_done_callback(self, call: Callable[[], object]) -> None:
        """Call `call` once the result, or an error, is there: in the engine's thread, or now; it must be quick."""
        self._future.add_done_callback(lambda _: call())

    def result(self, timeout: float | None = None) -> GenerationOutput:
        """Wait for the answer.

        Args:
            timeout: Seconds to wait; the request itself goes on afterwards.

        Raises:
            TimeoutError: It was not there in time.
            RequestError: The request failed, was aborted or was too late.
            EngineError: The engine died or was closed.
        """
        try:
            return self._future.result(timeout)
        except concurrent.futures.TimeoutError:
            raise TimeoutError(f"no answer to request {self.request_id} after {timeout} s") from None

    async def aresult(self) -> GenerationOutput:
        """As `result`, awaited; cancelling the task aborts the request."""
        try:
            return await asyncio.wrap_future(self._future)
        except asyncio.CancelledError:
            self.abort()
            raise

    def __iter__(self) -> Iterator[StreamDelta]:
        """Deltas as they come; raises what `result` would raise. The last delta has the output."""
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._deltas or self.done)
                    delta = self._deltas.popleft() if self._deltas else None
                if delta is None:
                    self._future.result()
                    return
                yield delta
        finally:
            self.abort()

    async def __aiter__(self) -> AsyncIterator[StreamDelta]:
        """As `__iter__`, on the running event loop, which is never blocked."""
        changed = asyncio.Event()
        loop = asyncio.get_running_loop()
        waker = _loop_waker(loop, changed)
        with self._changed:
            self._wakers.append(waker)
        try:
            while True:
                changed.clear()
                with self._changed:
                    done = self.done
                    deltas = list(self._deltas)
                    self._deltas.clear()
                for delta in deltas:
                    yield delta
                if done:
                    self._future.result()
                    return
                await changed.wait()
        finally:
            with self._changed:
                self._wakers.remove(waker)
            self.abort()

    # -- for the engine -------------------------------------------------------------------------

    def put(self, delta: StreamDelta) -> None:
        """Hand over new text."""
        with self._changed:
            self._deltas.append(delta)
            self._notify()

    def finish(self, delta: StreamDelta, output: GenerationOutput) -> None:
        """Hand over the last delta and the answer."""
        with self._changed:
            self._deltas.append(delta)
            self._future.set_result(output)
            self._abort = None  # leads to the engine, which a request that is over must not keep alive
            self._notify()

    def fail(self, error: Exception) -> None:
        """The request is over, without an answer. The first of `finish` and `fail` counts."""
        with self._changed:
            if not self._future.done():
                self._future.set_exception(error)
                self._abort = None
                self._notify()

    def _notify(self) -> None:
        self._changed.notify_all()
        for waker in self._wakers:
            waker()


def _loop_waker(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> Callable[[], object]:
    def wake() -> None:
        # A loop that was closed under its consumer has nobody left to wake.
        if not loop.is_closed():
            loop.call_soon_threadsafe(event.set)

    return wake
