"""Decides what each step computes. No tensors, no clock, no text: testable with ints.

It knows how many tokens of a request are known and how many are computed. Prefill, a chunk of it, decode, the
rest after a cache hit and the way back after a preemption are one thing: computed must catch up with known.

A step, at most `max_num_batched_tokens` tokens of at most `max_num_seqs` requests::

    1. running requests that miss one token    a long prompt never delays those who already talk
    2. running requests that miss more         chunks, oldest first
    3. waiting requests, oldest first          the first that does not fit stops the line: nobody is overtaken for ever

Blocks for all known tokens are taken when a request starts, one more whenever it grows past them (where layers have a
window: for what it sees, chunk by chunk). If none is left, the newest running request gives up its blocks and waits
again. The oldest always goes on, so everyone gets there.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from mmserve.cache.groups import CacheGroup
from mmserve.cache.prefix_index import PrefixIndex
from mmserve.engine.batch import BlockCopy, NewRequest, ScheduledBatch, ScheduledChunk, StepOutput
from mmserve.engine.blocks import BlockBooks
from mmserve.engine.images import ImageBooks, ImageStep
from mmserve.engine.request import Request, RequestState
from mmserve.engine.spans import before_span, span_stop
from mmserve.errors import CapacityError

__all__ = ["PLACES_PER_PRIORITY", "Scheduler", "SchedulerLimits"]

PLACES_PER_PRIORITY = 1000
"""One level of priority is worth this many places in line, so a low priority waits long but not for ever."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What a step and a request may take; fields as in `EngineConfig`, all resolved.

    Attributes:
        num_blocks: Of the pool that all groups share.
        groups: The cache's groups. If any has no window, the first has none.
        pipeline_depth: Steps that may run at once, each of which takes its share of the running requests.
    """

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_images_per_step: int
    encoder_cache_memory: int
    groups: tuple[CacheGroup, ...] = (CacheGroup(),)
    pipeline_depth: int = 1


@dataclass(slots=True)
class _Step:
    """A step being put together."""

    tokens_left: int
    images: ImageStep
    chunks: dict[str, ScheduledChunk] = field(default_factory=dict)
    new: list[NewRequest] = field(default_factory=list)
    copies: dict[str, tuple[BlockCopy, ...]] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)
    has_prefill: bool = False
    stuck: bool = False


class Scheduler:
    """Holds all requests that are not finished.

    Args:
        limits: What a step and a request may take.
        index: The prefix index, named after the model and made for the cache's groups; None turns prefix caching off.
    """

    def __init__(self, limits: SchedulerLimits, index: PrefixIndex | None) -> None:
        self.limits = limits
        self.blocks = BlockBooks(limits.num_blocks, limits.groups, limits.block_size, index)
        self.images = ImageBooks(limits.encoder_cache_memory, limits.max_images_per_step)
        self.num_preemptions = 0
        self.num_prefix_queried = 0
        self.num_prefix_hit = 0
        self._requests: dict[str, Request] = {}
        self._arrivals: dict[str, NewRequest] = {}
        self._waiting: list[Request] = []  # the next one last
        self._running: list[Request] = []  # the oldest first
        self._in_flight: dict[str, Request] = {}  # in steps that have begun and not ended
        self._finished: list[str] = []
        self._num_steps = 0
        self._blocked_until = 0

    # -- looking --------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests without blocks."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests with blocks."""
        return len(self._running)

    def waiting_ids(self) -> list[str]:
        """Ids of the requests without blocks, as they are now; from any thread."""
        return [request.request_id for request in self._waiting.copy()]

    def has_work(self) -> bool:
        """Whether a step would do anything: compute, or tell the runner what to forget."""
        return bool(self._running or self._waiting or self._finished)

    def has_idle(self) -> bool:
        """Whether a request could be in a step and is in none."""
        return bool(self._waiting) or any(request.request_id not in self._in_flight for request in self._running)

    def in_flight(self, request_id: str) -> bool:
        """Whether a step that has begun and not ended computes for the request, even if it was given up since."""
        return request_id in self._in_flight

    def get(self, request_id: str) -> Request | None:
        """The request, unless it is finished or unknown."""
        return self._requests.get(request_id)

    def check_admission(self, num_prompt: int, max_tokens: int, n: int = 1, longest_span: int = 0) -> None:
        """Whether a request can ever run; its longest both-way span is computed in one piece.

        Raises:
            CapacityError: It can not; says the numbers.
        """
        if n > self.limits.max_num_seqs:
            raise CapacityError(f"{n} answers at once were asked for, but max_num_seqs is {self.limits.max_num_seqs}")
        total, limit = num_prompt + max_tokens, self.limits.max_model_len
        if total > limit:
            raise CapacityError(
                f"the expanded prompt has {num_prompt} tokens and max_tokens is {max_tokens}: {total} together, "
                f"but max_model_len is {limit}"
            )
        # The last token of an answer is never computed.
        chunk = max(self.limits.max_num_batched_tokens, longest_span)
        needed = self.blocks.most(total - 1, chunk)
        if needed > self.limits.num_blocks:
            windows = any(group.window is not None for group in self.limits.groups)
            pieces = f" (in pieces of up to {chunk}, for windows move on between them)" if windows else ""
            raise CapacityError(
                f"{num_prompt} prompt tokens and max_tokens {max_tokens}{pieces} need {needed} cache blocks of "
                f"{self.limits.block_size} tokens, but there are {self.limits.num_blocks}"
            )

    def check_integrity(self) -> None:
        """All books agree with each other.

        Raises:
            RuntimeError: With the first contradiction found.
        """
        holders = [*self._requests.values(), *self._given_up()]
        self.blocks.check_integrity(holders)
        self.images.check_integrity(holders)
        if sorted(map(id, self._requests.values())) != sorted(map(id, (*self._waiting, *self._running))):
            raise RuntimeError("a request is in no line, or in two")

    # -- coming and going -----------------------------------------------------------------------

    def add(self, request: Request, arrival: NewRequest) -> None:
        """Put a request in line; `arrival` is what the runner will be told."""
        self._requests[request.request_id] = request
        self._arrivals[request.request_id] = arrival
        self._enqueue(request)

    def finish(self, request_id: str, *, poisoned: bool = False) -> None:
        """Forget a request, wherever it is; its blocks and images are free for others.

        What is in a step that has begun holds what it has until the step has ended, for other ranks are still to hear
        of its token.

        Args:
            request_id: Whose; unknown ids are ignored.
            poisoned: Its keys and values are not to be trusted: nobody may find them.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self._arrivals.pop(request_id, None)
        (self._running if request.state is RequestState.RUNNING else self._waiting).remove(request)
        if poisoned:
            self.blocks.disown(request)
        request.state = RequestState.FINISHED
        if self._in_flight.get(request_id) is not request:
            self._let_go(request)

    # -- a step ---------------------------------------------------------------------------------

    def schedule(self) -> ScheduledBatch:
        """What to compute now; empty if nothing can be.

        `update` hears of each step's output in the order of steps. Until then its requests are in no other step.
        """
        step = _Step(self.limits.max_num_batched_tokens, self.images.begin_step())
        idle = [request for request in self._running if request.request_id not in self._in_flight]
        decoding = [request for request in idle if request.num_missing == 1]
        prefilling = [request for request in idle if request.num_missing > 1]
        # Where stages work at once, a step takes its share of the requests, and leaves the others to the next.
        share = -(-len(self._running) // self.limits.pipeline_depth)
        for request in (*decoding, *prefilling):
            if request.state is RequestState.RUNNING and len(step.chunks) < share:
                self._continue(request, step)
        # Newcomers would take the budgets that a stuck request is waiting for.
        seats = self.limits.max_num_seqs - sum(request.num_seats for request in (*self._running, *self._given_up()))
        while self._waiting and not step.stuck and step.tokens_left > 0:
            request = self._waiting[-1]
            if request.num_seats > seats or not self._start(request, step):
                break
            seats -= request.num_seats
        self._num_steps += 1
        self._in_flight.update((request_id, self._requests[request_id]) for request_id in step.chunks)
        finished, self._finished = tuple(self._finished), []
        copies = tuple(copy for copies in step.copies.values() for copy in copies)
        return ScheduledBatch(
            step=self._num_steps,
            new=tuple(step.new),
            chunks=tuple(step.chunks.values()),
            copies=copies,
            scrubbed=self.blocks.take_scrubs(copies),
            encode=tuple(step.images.encode),
            preempted=tuple(step.preempted),
            dropped_images=tuple(step.images.dropped),
            finished=finished,
        )

    def update(self, batch: ScheduledBatch, output: StepOutput) -> None:
        """Take in what a step did: computed counts, full blocks, images' sizes, sampled tokens.

        Requests in `output.failed` are left as they are, for `finish` with `poisoned=True`.
        """
        self.images.settle(batch, output)
        for chunk in batch.chunks:
            request = self._in_flight.pop(chunk.request_id)
            if request.state is RequestState.FINISHED:
                # Given up while the step ran: forks that began with it are nobody's.
                self._finished += [fork for fork in request.forks if chunk.forks and fork in output.sampled]
                self._let_go(request)
                continue
            if chunk.request_id in output.failed:
                continue
            request.num_computed = chunk.start + chunk.num_tokens
            self.blocks.register(request)
            self.blocks.give_back(request)
            if request.next_image < len(request.images):
                self.images.release_computed(request)
            request.proven |= chunk.samples
            if chunk.forks:
                self._fork(request, output)
            if chunk.samples:
                request.token_ids.append(output.sampled[chunk.request_id].token_id)

    # -- one request in a step ------------------------------------------------------------------

    def _continue(self, request: Request, step: _Step) -> None:
        """Compute more of a running request, taking blocks from newer ones if need be."""
        stop = self._chunk_stop(request, request.num_computed, step)
        if stop == request.num_computed:
            step.stuck = True
            return
        while self.blocks.missing(request, stop) > self.blocks.pool.num_available:
            victim = self._running[-1]
            if victim.request_id in self._in_flight:
                step.stuck = True  # its blocks are being written: wait for that step
                return
            self._preempt(victim, step)
            if victim is request:
                return
        copies = self.blocks.own_last(request)
        if copies:
            step.copies[request.request_id] = copies
        self._add_chunk(request, stop, self.blocks.grow(request, stop), step, restarted=False)

    def _start(self, request: Request, step: _Step) -> bool:
        """Give the first in line its blocks and a chunk, if both fit now."""
        available = self.blocks.pool.num_available
        if self._running and available < self._blocked_until:
            return False
        hits = self.blocks.find_prefix(request)
        start = len(hits) * self.limits.block_size
        stop = self._chunk_stop(request, start, step)
        if stop == start:
            return False
        # Room for everyone who runs to grow by a block, or the newcomer would be preempted at once.
        needed = self.blocks.cost(request, hits, stop) + len(self._running) * len(self.limits.groups)
        if (self._running or self._in_flight) and needed > available:
            self._blocked_until = needed
            return False
        self._waiting.pop()
        self._blocked_until = 0
        blocks = self.blocks.start(request, hits, stop)
        self.images.skip_to(request, start)
        if not request.started:
            self._introduce(request, step)
        request.state = RequestState.RUNNING
        insort(self._running, request, key=lambda r: r.order)
        self._add_chunk(request, stop, blocks, step, restarted=True)
        return True

    def _introduce(self, request: Request, step: _Step) -> None:
        """A request runs for the first time."""
        request.started = True
        request.num_cached = min(request.num_computed, request.num_prompt)
        self.num_prefix_queried += request.num_prompt
        self.num_prefix_hit += request.num_cached
        step.new.append(self._arrivals.pop(request.request_id))

    def _add_chunk(
        self, request: Request, stop: int, blocks: tuple[tuple[int, ...], ...], step: _Step, *, restarted: bool
    ) -> None:
        if request.next_image < len(request.images):
            self.images.hold(request, stop, step.images)
        start, samples = request.num_computed, stop == request.num_tokens
        step.chunks[request.request_id] = ScheduledChunk(
            request.request_id, start, stop - start, blocks, restarted, samples, samples and bool(request.forks)
        )
        step.tokens_left = max(0, step.tokens_left - (stop - start))
        step.has_prefill |= stop - start > 1

    def _preempt(self, request: Request, step: _Step) -> None:
        """Take a running request's blocks, and its chunk if it has one; it computes all again later."""
        step.copies.pop(request.request_id, None)
        chunk = step.chunks.pop(request.request_id, None)
        if chunk is not None:
            step.tokens_left += chunk.num_tokens
        step.preempted.append(request.request_id)
        self._running.remove(request)
        self._release(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._enqueue(request)

    def _fork(self, request: Request, output: StepOutput) -> None:
        """The prompt is computed: its further answers begin, sharing its blocks."""
        for number, request_id in enumerate(request.forks, 1):
            child = request.fork(number)
            self.blocks.fork(child)
            child.token_ids.append(output.sampled[request_id].token_id)
            self._requests[request_id] = child
            insort(self._running, child, key=lambda r: r.order)
        request.forks = ()

    # -- limits ---------------------------------------------------------------------------------

    def _chunk_stop(self, request: Request, start: int, step: _Step) -> int:
        """Where a chunk that begins at `start` may end in this step; `start` itself if it has to wait."""
        stop = min(request.num_tokens, start + step.tokens_left)
        if stop <= start or start >= request.num_prompt:
            return stop
        if request.chunk_limit is not None:
            stop = min(stop, start + request.chunk_limit)
        stop = before_span(request.spans, stop)
        if stop <= start:
            # The first prefill of a step may exceed the budget, for a span longer than it (or than what the
            # decodes have left of it) would never be computed otherwise.
            if step.has_prefill:
                return start
            stop = span_stop(request.spans, start)
        return self.images.limit(request, start, stop, step.images)

    # -- lines ----------------------------------------------------------------------------------

    def _enqueue(self, request: Request) -> None:
        request.state = RequestState.WAITING
        insort(self._waiting, request, key=lambda r: tuple(-place for place in r.order))
        self._blocked_until = 0

    def _given_up(self) -> list[Request]:
        """Requests that are over, in steps that are not."""
        return [request for request in self._in_flight.values() if request.state is RequestState.FINISHED]

    def _let_go(self, request: Request) -> None:
        """A request is over, and in no step any more."""
        self._release(request)
        if request.started:
            self._finished.append(request.request_id)
        self._blocked_until = 0

    def _release(self, request: Request) -> None:
        """Give up everything a request holds; it is as if it had not started."""
        self.blocks.release(request)
        self.images.release(request)
