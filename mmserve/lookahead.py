"""Which prompts are prepared now: enough that the model never waits for pixels, and no more than their bytes allow.

A large picture's pixels are forty times its rows, so prompts with pictures stand in line until there is room::

    in line          being prepared      prepared, not begun       begun
    7  6  5  4       3                   2                         0  1
                     '---- at most `limit` bytes, or one ----'     their pixels go as they are encoded
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field

from mmserve.engine.handle import RequestHandle

__all__ = ["Lookahead", "Prepared"]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that the engine has; nbytes: of tensors that were made for it."""

    handle: RequestHandle
    nbytes: int


@dataclass(order=True, slots=True)
class _Task:
    priority: int
    number: int
    request_id: str = field(compare=False)
    prepare: Callable[[], Prepared] = field(compare=False)
    future: Future[RequestHandle] = field(compare=False, default_factory=Future)


class Lookahead:
    """The line of prompts with pictures. What the next one takes is guessed: as much as the last one;
    so where small pictures are followed by large ones, each thread may once have one too many.

    Args:
        executor: Runs what prepares a prompt.
        threads: Of it.
        limit: Bytes of tensors of prompts that no step has begun with. One prompt may always be prepared.
    """

    def __init__(self, executor: Executor, threads: int, limit: int) -> None:
        self._executor = executor
        self._threads = threads
        self._limit = limit
        self._lock = threading.Lock()
        self._line: list[_Task] = []
        self._numbers = itertools.count()
        self._num_preparing = 0
        self._num_ready = 0
        self._held = 0
        self._guess: int | None = None
        self._closed: Exception | None = None

    def submit(self, request_id: str, priority: int, prepare: Callable[[], Prepared]) -> Future[RequestHandle]:
        """Put a prompt in line, behind those of its priority; a lower one comes sooner.

        `prepare` runs in the executor, and what it raises is the future's. Cancelling the future takes it out.
        """
        task = _Task(priority, next(self._numbers), request_id, prepare)
        with self._lock:
            if self._closed is not None:
                raise self._closed
            heapq.heappush(self._line, task)
        self._start_next()
        return task.future

    def drop(self, request_id: str, error: Exception) -> bool:
        """Fail a request that is still in line; returns whether it was."""
        with self._lock:
            task = next((task for task in self._line if task.request_id == request_id), None)
            if task is not None:
                self._line.remove(task)
                heapq.heapify(self._line)
        return task is not None and _fail(task, error)

    def close(self, error: Exception) -> None:
        """Fail all that are in line, and all that come."""
        with self._lock:
            self._closed = error
            left, self._line = self._line, []
        for task in left:
            _fail(task, error)

    def _start_next(self) -> None:
        while True:
            with self._lock:
                if not (self._line and self._has_room()):
                    return
                task = heapq.heappop(self._line)
                if not task.future.set_running_or_notify_cancel():
                    continue
                self._num_preparing += 1
            try:
                self._executor.submit(self._run, task)
            except RuntimeError as error:  # it was shut down
                self._ended()
                task.future.set_exception(self._closed or error)
                return

    def _has_room(self) -> bool:
        if self._num_preparing + self._num_ready == 0:
            return True
        if self._guess is None:
            return False
        expected = self._held + (self._num_preparing + 1) * self._guess
        return self._num_preparing < self._threads and expected <= self._limit

    def _run(self, task: _Task) -> None:
        try:
            prepared = task.prepare()
        except BaseException as error:  # noqa: BLE001 - whoever waits must hear of it
            self._ended()
            task.future.set_exception(error)
        else:
            self._ended(prepared)
            prepared.handle.add_begun_callback(lambda nbytes=prepared.nbytes: self._begun(nbytes))  # type: ignore[misc]
            task.future.set_result(prepared.handle)
        self._start_next()

    def _ended(self, prepared: Prepared | None = None) -> None:
        with self._lock:
            self._num_preparing -= 1
            if prepared is not None:
                self._num_ready += 1
                self._held += prepared.nbytes
                self._guess = prepared.nbytes

    def _begun(self, nbytes: int) -> None:
        with self._lock:
            self._num_ready -= 1
            self._held -= nbytes
        self._start_next()


def _fail(task: _Task, error: Exception) -> bool:
    if not task.future.set_running_or_notify_cancel():
        return False
    task.future.set_exception(error)
    return True
