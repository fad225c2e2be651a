"""A request's owner's end: its deltas, its result, and the way to abort it; from any thread or event loop.

A waiter trusts nobody with its deadline: the engine keeps it between steps, and a step may hang in a caller's own
logits processor. So who waits also looks at the clock, and says `DeadlineExceeded` itself when the engine does not.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

from mmserve.errors import DeadlineExceeded, InvalidRequestError
from mmserve.types import GenerationOutput, StreamDelta

__all__ = ["RequestHandle", "check_caller", "check_request_id", "drop_locals"]


def check_caller(engine_thread: threading.Thread | None) -> None:
    """Whether the calling thread may wait for that engine.

    Raises:
        InvalidRequestError: It is the engine's own, which would wait for itself for ever.
    """
    if threading.current_thread() is engine_thread:
        raise InvalidRequestError(
            "the engine's thread, in which logits processors are called, can not wait for an answer of its own engine: "
            "ask before the request that has the processor, or ask another pipeline"
        )


def check_request_id(request_id: object) -> None:
    """Whether it can name a request.

    Raises:
        InvalidRequestError: It is no string.
    """
    if not isinstance(request_id, str):
        raise InvalidRequestError(f"a request's id is a string, not a {type(request_id).__name__}")


def drop_locals(error: BaseException | None) -> None:
    """Let go of the variables of all frames that an error, and what led to it, went through; it still says where.

    An error may be kept long, and a step's tensors are large.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class RequestHandle:
    """One submitted request.

    Its deltas are handed out once: iterate it in one place, with `for` or `async for`. Leaving the loop early
    aborts the request. `result` may be asked for as well, by anyone, any number of times.

    Args:
        request_id: Unique in the engine.
        abort: Called with this handle to abort the request.
        deadline: `time.monotonic()` at which every waiter gives up with DeadlineExceeded; None: never.
        engine_thread: The one thread that can not wait here, for it is the one that makes the answer.
    """

    def __init__(
        self,
        request_id: str,
        abort: Callable[[RequestHandle], object],
        *,
        deadline: float | None = None,
        engine_thread: threading.Thread | None = None,
    ) -> None:
        self.request_id = request_id
        self._deadline = deadline
        self._engine_thread = engine_thread
        self._abort: Callable[[RequestHandle], object] | None = abort
        self._future: concurrent.futures.Future[GenerationOutput] = concurrent.futures.Future()
        self._future.set_running_or_notify_cancel()
        self._has_begun = False
        self._on_begun: list[Callable[[], object]] = []
        self._changed = threading.Condition()
        self._deltas: deque[StreamDelta] = deque()
        self._wakers: list[Callable[[], object]] = []
        self._future.add_done_callback(lambda _: self.begin())

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

    def add_begun_callback(self, call: Callable[[], object]) -> None:
        """Call `call` once a step takes the request or it is over: in the engine's thread, or now; it must be quick."""
        with self._changed:
            begun = self._has_begun
            if not begun:
                self._on_begun.append(call)
        if begun:
            call()

    def result(self, timeout: float | None = None) -> GenerationOutput:
        """Wait for the answer.

        Args:
            timeout: Seconds to wait; the request itself goes on afterwards.

        Raises:
            TimeoutError: It was not there in time.
            InvalidRequestError: This is the engine's thread, and the answer is not there yet.
            RequestError: The request failed, was aborted or was too late.
            EngineError: The engine died or was closed.
        """
        self._check_wait()
        bounds = [seconds for seconds in (timeout, self.seconds_left()) if seconds is not None]
        try:
            return self._future.result(min(*bounds, threading.TIMEOUT_MAX) if bounds else None)
        except concurrent.futures.TimeoutError:
            if not self.expire():
                raise TimeoutError(f"no answer to request {self.request_id} after {timeout} s") from None
        return self._future.result()

    def seconds_left(self) -> float | None:
        """Seconds until the deadline, at most as many as a lock can wait; None: there is none."""
        if self._deadline is None:
            return None
        return min(max(0.0, self._deadline - time.monotonic()), threading.TIMEOUT_MAX)

    def expire(self) -> bool:
        """If its deadline is over and nothing came of the request, end it here; returns whether it is over."""
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self.fail(self.too_late())
        return self.done

    def too_late(self) -> DeadlineExceeded:
        """The error of a request whose deadline is over."""
        return DeadlineExceeded(f"request {self.request_id} did not finish in its time")

    async def aresult(self) -> GenerationOutput:
        """As `result`, awaited; cancelling the task aborts the request."""
        self._check_wait()
        try:
            with self._alarm(asyncio.get_running_loop()):
                return await asyncio.wrap_future(self._future)
        except asyncio.CancelledError:
            self.abort()
            raise

    def __iter__(self) -> Iterator[StreamDelta]:
        """Deltas as they come; raises what `result` would raise. The last delta has the output."""
        try:
            while True:
                with self._changed:
                    if not self._deltas:
                        self._check_wait()
                        self._changed.wait_for(lambda: self._deltas or self.done, self.seconds_left())
                    delta = self._deltas.popleft() if self._deltas else None
                if delta is not None:
                    yield delta
                elif self.expire():
                    self._future.result()
                    return
        finally:
            self.abort()

    async def __aiter__(self) -> AsyncIterator[StreamDelta]:
        """As `__iter__`, on the running event loop, which is never blocked."""
        self._check_wait()
        changed = asyncio.Event()
        loop = asyncio.get_running_loop()
        waker = _loop_waker(loop, changed)
        with self._changed:
            self._wakers.append(waker)
        try:
            with self._alarm(loop):
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

    def _check_wait(self) -> None:
        if not self.done:
            check_caller(self._engine_thread)

    @contextmanager
    def _alarm(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Ends the request at its deadline, from the event loop on which somebody waits for it."""
        left = self.seconds_left()
        timer = None if left is None else loop.call_later(left, lambda: self.fail(self.too_late()))
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()

    # -- for the engine -------------------------------------------------------------------------

    def begin(self) -> None:
        """A step takes the request, for the first time or once more."""
        with self._changed:
            self._has_begun = True
            calls, self._on_begun = self._on_begun, []
        for call in calls:
            call()

    def put(self, delta: StreamDelta) -> None:
        """Hand over new text, unless the request is over."""
        with self._changed:
            if not self.done:
                self._deltas.append(delta)
                self._notify()

    def finish(self, delta: StreamDelta, output: GenerationOutput) -> None:
        """Hand over the last delta and the answer. The first of `finish` and `fail` counts."""
        with self._changed:
            if not self.done:
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
