"""The engine's thread: takes in what callers ask for, and steps while there is work.

    inbox       under a lock      requests and aborts, in order
    schedule    Scheduler         blocks, chunks, images
    run         ModelRunner       images, forward, tokens
    update      Scheduler         computed counts, full blocks
    deliver     Ticket            text, stop, deltas, answers

A request that fails is told so and is gone; the others go on. A step that raises ends the loop: everyone who
waits, and every later call, hears why.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mmserve.engine.batch import NewRequest, SampledToken, ScheduledBatch, StepOutput
from mmserve.engine.handle import RequestHandle, drop_locals
from mmserve.engine.request import Request
from mmserve.engine.scheduler import Scheduler
from mmserve.engine.stats import StatsRecorder
from mmserve.engine.steps import StepRunner
from mmserve.engine.ticket import Ticket
from mmserve.errors import (
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    Overloaded,
    PipelineClosedError,
    RequestAborted,
    RequestError,
)

__all__ = ["EngineLoop", "Submission"]

_SPARE_DEADLINES = 64
"""Deadlines of finished requests that are kept before they are cleared out."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A request on its way to the engine's thread.

    Attributes:
        requests: One prompt to compute; or one an answer, for a model that can not fork.
        ticket: Its answers and its owner's end.
        deadline: `time.monotonic()` after which it is given up.
    """

    requests: tuple[tuple[Request, NewRequest], ...]
    ticket: Ticket
    deadline: float | None


class EngineLoop:
    """Owns the scheduler and the runner; nothing else touches them once the thread runs.

    Args:
        scheduler: Empty.
        runner: Ready.
        max_queue: Most requests waiting.
    """

    def __init__(self, scheduler: Scheduler, runner: StepRunner, max_queue: int) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._max_queue = max_queue
        self._stats = StatsRecorder()
        self._tickets: dict[str, Ticket] = {}  # by the id of each answer
        self._deadlines: list[tuple[float, int, Ticket]] = []
        self._num_deadlines = 0
        self._begun: deque[tuple[ScheduledBatch, float]] = deque()  # steps that have not ended, and when they began
        # Shared with callers, under the lock:
        self._lock = threading.Condition()
        self._inbox: deque[Submission | Ticket] = deque()  # a ticket: abort it
        self._open: dict[str, Ticket] = {}
        self._closing = False
        self._death: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="mmserve-engine", daemon=True)
        self._thread.start()

    # -- for callers, from any thread -----------------------------------------------------------

    @property
    def thread(self) -> threading.Thread:
        """The engine's thread."""
        return self._thread

    def check_alive(self) -> None:
        """Whether requests are taken.

        Raises:
            EngineDeadError: A step has failed; says why.
            PipelineClosedError: After `close`.
        """
        if self._death is not None:
            raise self._death_notice()
        if self._closing:
            raise PipelineClosedError("this engine was closed")

    def submit(self, submission: Submission) -> None:
        """Put a request in line.

        Raises:
            Overloaded: The queue is full.
            InvalidRequestError: Its id is in use.
            EngineError: As `check_alive`.
        """
        with self._lock:
            self.check_alive()
            request_id = submission.ticket.request_id
            if request_id in self._open:
                raise InvalidRequestError(f"a request with id {request_id!r} is still running")
            waiting = self._num_submitted() + self._num_tickets_waiting()
            if waiting >= self._max_queue:
                raise Overloaded(f"{waiting} requests are waiting and max_queue is {self._max_queue}: try later")
            self._open[request_id] = submission.ticket
            self._inbox.append(submission)
            self._lock.notify()

    def abort(self, request_id: str, handle: RequestHandle | None = None) -> bool:
        """Give a request up; its waiters hear RequestAborted. Returns whether it was there to abort.

        Args:
            request_id: Whose.
            handle: If given, only the request with this very handle: an id may have been used again since.
        """
        with self._lock:
            ticket = self._open.get(request_id)
            if ticket is None or (handle is not None and ticket.handle is not handle):
                return False
            self._inbox.append(ticket)
            self._lock.notify()
            return True

    def stats(self) -> dict[str, Any]:
        """Numbers right now."""
        with self._lock:
            inbox = self._num_submitted()
            state = "dead" if self._death is not None else "closed" if self._closing else "alive"
        return self._stats.snapshot(self._scheduler, inbox, time.monotonic(), state)

    def close(self) -> None:
        """End the thread after the step it is in. Whoever waits hears PipelineClosedError. Twice is fine."""
        with self._lock:
            self._closing = True
            self._lock.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _num_submitted(self) -> int:
        """Requests in the inbox (aborts wait for nothing); under the lock."""
        return sum(isinstance(item, Submission) for item in self._inbox)

    def _num_tickets_waiting(self) -> int:
        """Requests of callers in the scheduler's line; several answers of one, each in line by itself, are one."""
        ids = self._scheduler.waiting_ids()
        return len({id(ticket) for request_id in ids if (ticket := self._tickets.get(request_id)) is not None})

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take_inbox():
                self._expire()
                if self._begun or self._scheduler.has_work():
                    self._step()
        except BaseException as error:  # noqa: BLE001 - the border of the engine's life: everyone must hear of it
            self._death = error
        self._end()
        drop_locals(self._death)

    def _step(self) -> None:
        """Begin a step if there is one to begin; wait for the oldest when there is not, or when enough have begun."""
        began = time.monotonic()
        batch = self._scheduler.schedule()
        if batch.is_empty:
            if not self._begun:
                raise RuntimeError("requests are waiting but nothing can be scheduled: the scheduler's books are wrong")
        else:
            for new in batch.new:
                if (ticket := self._tickets.get(new.request_id)) is not None:
                    ticket.handle.begin()
            self._runner.begin(batch)
            self._begun.append((batch, began))
            if len(self._begun) < self._runner.depth and self._scheduler.has_idle():
                return
        self._end_step()

    def _end_step(self) -> None:
        """Wait for the oldest step that has begun, and hand out what came of it."""
        batch, began = self._begun.popleft()
        output = self._runner.end()
        self._scheduler.update(batch, output)
        self._deliver(batch, output, began)

    def _take_inbox(self) -> bool:
        """Take in what callers have asked for, waiting for it if there is nothing else to do; False to end."""
        with self._lock:
            self._lock.wait_for(lambda: self._inbox or self._closing or self._begun or self._scheduler.has_work())
            if self._closing:
                return False
            items = list(self._inbox)
            self._inbox.clear()
        for item in items:
            if isinstance(item, Submission):
                self._begin(item)
            else:
                self._fail(item, RequestAborted(f"request {item.request_id} was aborted"))
        return True

    def _begin(self, submission: Submission) -> None:
        # An id may have been used before, by a request that was given up in a step whose tokens are still to come.
        while self._begun and any(map(self._scheduler.in_flight, submission.ticket.answers)):
            self._end_step()
        self._tickets |= dict.fromkeys(submission.ticket.answers, submission.ticket)
        for request, arrival in submission.requests:
            self._scheduler.add(request, arrival)
        if submission.deadline is not None:
            self._num_deadlines += 1  # breaks ties: tickets have no order
            heapq.heappush(self._deadlines, (submission.deadline, self._num_deadlines, submission.ticket))

    def _expire(self) -> None:
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            ticket = heapq.heappop(self._deadlines)[-1]
            self._fail(ticket, ticket.handle.too_late())
        if len(self._deadlines) > 2 * len(self._open) + _SPARE_DEADLINES:
            # Answers that came long before their deadline must not pile up until then.
            self._deadlines = [entry for entry in self._deadlines if not entry[-1].closed]
            heapq.heapify(self._deadlines)

    def _deliver(self, batch: ScheduledBatch, output: StepOutput, began: float) -> None:
        """Hand the tokens and failures of a step that `began` then to their owners."""
        now = time.monotonic()
        self._stats.record(batch, output, began, now)
        for new in batch.new:
            ticket = self._tickets.get(new.request_id)
            if ticket is None:
                continue  # it was given up while the step ran
            request, answers = self._scheduler.get(new.request_id), ticket.answers
            for answer_id in (new.request_id, *(fork.request_id for fork in new.forks)):
                answers[answer_id].first_scheduled = began
                answers[answer_id].num_cached = request.num_cached if request is not None else 0
        for request_id, seconds in output.encode_seconds.items():
            if (ticket := self._tickets.get(request_id)) is not None:
                for answer in ticket.answers.values():
                    answer.encode_seconds += seconds
        for request_id, report in output.prompt_reports.items():
            if (ticket := self._tickets.get(request_id)) is not None:
                self._guarded(ticket, lambda a=ticket.answers[request_id], r=report: a.take_prompt_report(r))  # type: ignore[misc]
        # One answer's failure is that of all answers to its request, so their tokens find no ticket any more.
        for answer_id, error in output.failed.items():
            if answer_id in self._tickets:
                self._fail(self._tickets[answer_id], error, poisoned=True)
        for answer_id, token in output.sampled.items():
            if answer_id in self._tickets:
                self._guarded(self._tickets[answer_id], lambda a=answer_id, t=token: self._take(a, t, now))  # type: ignore[misc]

    def _guarded(self, ticket: Ticket, work: Callable[[], object]) -> None:
        """Make text of tokens; a tokenizer that raises fails that request alone."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the border of a request's blast radius
            failure = RequestError(f"the tokens could not be made text: {type(error).__name__}: {str(error)[:200]}")
            failure.__cause__ = error
            self._fail(ticket, failure)

    def _take(self, answer_id: str, token: SampledToken, now: float) -> None:
        if self._tickets[answer_id].take(answer_id, token, now):
            self._finish(answer_id)

    def _finish(self, answer_id: str) -> None:
        self._scheduler.finish(answer_id)
        ticket = self._tickets.pop(answer_id)
        if ticket.done:
            self._stats.finished += 1
            self._close_ticket(ticket)
            ticket.deliver()

    def _fail(self, ticket: Ticket, error: Exception, *, poisoned: bool = False) -> None:
        """End a request without an answer; one that is over already is left alone."""
        if ticket.closed:
            return
        for answer_id in ticket.open_ids:
            self._scheduler.finish(answer_id, poisoned=poisoned)
            self._tickets.pop(answer_id, None)
        self._stats.failed += 1
        self._close_ticket(ticket)
        drop_locals(error)
        ticket.handle.fail(error)

    def _close_ticket(self, ticket: Ticket) -> None:
        ticket.closed = True
        with self._lock:
            del self._open[ticket.request_id]

    def _end(self) -> None:
        """The thread's last act: nobody is left waiting, and the model keeps nothing of anyone."""
        with self._lock:
            self._closing = True
            tickets = list(self._open.values())
            self._open.clear()
            self._inbox.clear()
        for ticket in tickets:
            if self._death is None:  # of one that died half way through a step, the books may be half written
                for answer_id in ticket.open_ids:
                    self._scheduler.finish(answer_id)
            self._stats.failed += 1
            error: EngineError = PipelineClosedError("the engine was closed before the answer was there")
            ticket.handle.fail(self._death_notice() if self._death is not None else error)
        self._runner.close()

    def _death_notice(self) -> EngineDeadError:
        notice = EngineDeadError(f"the engine has died: {type(self._death).__name__}: {self._death}")
        notice.__cause__ = self._death
        return notice
