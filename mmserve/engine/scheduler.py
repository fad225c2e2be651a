"""Decides what each step computes. No tensors, no clock, no text: testable with ints.

It knows how many tokens of a request are known and how many are computed. Prefill, a chunk of it, decode, the
rest after a cache hit and the way back after a preemption are one thing: computed must catch up with known.

A step, at most `max_num_batched_tokens` tokens of at most `max_num_seqs` requests::

    1. running requests that miss one token    a long prompt never delays those who already talk
    2. running requests that miss more         chunks, oldest first
    3. waiting requests, oldest first          the first that does not fit stops the line: nobody is overtaken for ever

Blocks for all known tokens are taken when a request starts, one more whenever it grows past them. If none is left, the
newest running request gives up its blocks and waits again; the oldest always goes on, so everyone gets there.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from mmserve.cache.block_pool import BlockPool
from mmserve.cache.encoder_ledger import EncoderLedger
from mmserve.cache.prefix_index import CachedBlock, PrefixIndex
from mmserve.engine.batch import ImageToEncode, NewRequest, ScheduledBatch, ScheduledChunk, StepOutput
from mmserve.engine.request import Request, RequestState
from mmserve.errors import CapacityError

__all__ = ["PLACES_PER_PRIORITY", "Scheduler", "SchedulerLimits"]

PLACES_PER_PRIORITY = 1000
"""One level of priority is worth this many places in line, so a low priority waits long but not for ever."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What a step and a request may take; fields as in `EngineConfig`, all resolved."""

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_images_per_step: int
    encoder_cache_memory: int
    enable_prefix_caching: bool = True


@dataclass(slots=True)
class _Step:
    """A step being put together."""

    tokens_left: int
    images_left: int
    chunks: dict[str, ScheduledChunk] = field(default_factory=dict)
    new: list[NewRequest] = field(default_factory=list)
    encode: list[ImageToEncode] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    has_prefill: bool = False
    stuck: bool = False


class Scheduler:
    """Holds all requests that are not finished, and all books on blocks and images.

    Args:
        limits: What a step and a request may take.
        index: The prefix index, named after the model; None turns prefix caching off.
    """

    def __init__(self, limits: SchedulerLimits, index: PrefixIndex | None) -> None:
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks)
        self.ledger = EncoderLedger(limits.encoder_cache_memory)
        self.index = index
        self.num_preemptions = 0
        self.num_prefix_queried = 0
        self.num_prefix_hit = 0
        self.num_image_uses = 0
        self.num_image_encodes = 0
        self._requests: dict[str, Request] = {}
        self._arrivals: dict[str, NewRequest] = {}
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._finished: list[str] = []
        self._step = 0
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

    def has_work(self) -> bool:
        """Whether a step would do anything: compute, or tell the runner what to forget."""
        return bool(self._running or self._waiting or self._finished)

    def get(self, request_id: str) -> Request | None:
        """The request, unless it is finished or unknown."""
        return self._requests.get(request_id)

    def check_admission(self, num_prompt: int, max_tokens: int) -> None:
        """Whether a request can ever run.

        Raises:
            CapacityError: It can not; says the numbers.
        """
        total, limit = num_prompt + max_tokens, self.limits.max_model_len
        if total > limit:
            raise CapacityError(
                f"the expanded prompt has {num_prompt} tokens and max_tokens is {max_tokens}: {total} together, "
                f"but max_model_len is {limit}"
            )
        needed = self._num_blocks(total - 1)
        if needed > self.limits.num_blocks:
            raise CapacityError(
                f"{num_prompt} prompt tokens and max_tokens {max_tokens} need {needed} cache blocks of "
                f"{self.limits.block_size} tokens, but there are {self.limits.num_blocks}"
            )

    # -- coming and going -----------------------------------------------------------------------

    def add(self, request: Request, arrival: NewRequest) -> None:
        """Put a request in line; `arrival` is what the runner will be told."""
        self._requests[request.request_id] = request
        self._arrivals[request.request_id] = arrival
        request.chain = self.index.root if self.index is not None and request.shareable else None
        self._enqueue(request)

    def finish(self, request_id: str, *, poisoned: bool = False) -> None:
        """Forget a request, wherever it is; its blocks and images are free for others.

        Args:
            request_id: Whose; unknown ids are ignored.
            poisoned: Its keys and values are not to be trusted: nobody may find them.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self._arrivals.pop(request_id, None)
        if request.state is RequestState.RUNNING:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        if poisoned and self.index is not None:
            for block in request.block_table:
                self._forget_block(block)
        self._release(request)
        request.state = RequestState.FINISHED
        if request.started:
            self._finished.append(request_id)
        self._blocked_until = 0

    # -- a step ---------------------------------------------------------------------------------

    def schedule(self) -> ScheduledBatch:
        """What to compute now. The next call must come after `update` with this one's output."""
        step = _Step(self.limits.max_num_batched_tokens, self.limits.max_images_per_step)
        step.dropped += self.ledger.trim()
        decoding = [request for request in self._running if request.num_missing == 1]
        prefilling = [request for request in self._running if request.num_missing > 1]
        for request in (*decoding, *prefilling):
            if request.state is RequestState.RUNNING:
                self._continue(request, step)
        # Newcomers would take the budgets that a running request is waiting for.
        while self._waiting and not step.stuck and self._has_place(step):
            if not self._start(self._waiting[-1], step):
                break
        self._step += 1
        finished, self._finished = tuple(self._finished), []
        return ScheduledBatch(
            step=self._step,
            new=tuple(step.new),
            chunks=tuple(step.chunks.values()),
            encode=tuple(step.encode),
            preempted=tuple(step.preempted),
            dropped_images=tuple(step.dropped),
            finished=finished,
        )

    def update(self, batch: ScheduledBatch, output: StepOutput) -> None:
        """Take in what a step did: computed counts, images' sizes, sampled tokens; register full blocks.

        Requests in `output.failed` are left as they are, for `finish` with `poisoned=True`.
        """
        for image in batch.encode:
            if image.key in output.image_bytes:
                self.ledger.settle(image.key, output.image_bytes[image.key])
            else:
                self.ledger.discard(image.key)
        for chunk in batch.chunks:
            request = self._requests.get(chunk.request_id)
            if request is None or chunk.request_id in output.failed:
                continue
            request.num_computed = chunk.start + chunk.num_tokens
            self._register_full_blocks(request)
            self._release_computed_images(request)
            if chunk.samples:
                request.token_ids.append(output.sampled[chunk.request_id].token_id)

    def _has_place(self, step: _Step) -> bool:
        return len(self._running) < self.limits.max_num_seqs and step.tokens_left > 0

    # -- one request in a step ------------------------------------------------------------------

    def _continue(self, request: Request, step: _Step) -> None:
        """Compute more of a running request, taking blocks from newer ones if need be."""
        stop = self._chunk_stop(request, request.num_computed, step)
        if stop == request.num_computed:
            step.stuck = True
            return
        wanted = self._num_blocks(request.num_tokens) - len(request.block_table)
        while wanted > self.pool.num_available:
            victim = self._running[-1]
            self._preempt(victim, step)
            if victim is request:
                return
        blocks = self._allocate(wanted)
        request.block_table += blocks
        self._add_chunk(request, stop, tuple(blocks), restarted=False, step=step)

    def _start(self, request: Request, step: _Step) -> bool:
        """Give the first in line its blocks and a chunk, if both fit now."""
        if self._running and self.pool.num_available < self._blocked_until:
            return False
        hits = self._find_prefix(request)
        start = len(hits) * self.limits.block_size
        stop = self._chunk_stop(request, start, step)
        if stop == start:
            return False
        wanted = self._num_blocks(request.num_tokens) - len(hits)
        revived = sum(self.pool.refcount(entry.block) == 0 for entry in hits)
        # Room for everyone who runs to grow by a block, or the newcomer would be preempted at once.
        needed = wanted + revived + len(self._running)
        if self._running and needed > self.pool.num_available:
            self._blocked_until = needed
            return False
        self._waiting.pop()
        self._blocked_until = 0
        self.pool.share(entry.block for entry in hits)
        request.block_table = [entry.block for entry in hits]
        request.block_table += self._allocate(wanted)
        request.num_computed = start
        request.num_registered = len(hits)
        if hits:
            request.chain = hits[-1]
        while request.next_image < len(request.images) and request.images[request.next_image].last_row < start:
            request.next_image += 1
        if not request.started:
            request.started = True
            request.num_cached = min(start, request.num_prompt)
            self.num_prefix_queried += request.num_prompt
            self.num_prefix_hit += request.num_cached
            step.new.append(self._arrivals.pop(request.request_id))
        request.state = RequestState.RUNNING
        insort(self._running, request, key=lambda r: r.order)
        self._add_chunk(request, stop, tuple(request.block_table), restarted=True, step=step)
        return True

    def _add_chunk(self, request: Request, stop: int, blocks: tuple[int, ...], *, restarted: bool, step: _Step) -> None:
        start = request.num_computed
        if request.next_image < len(request.images):
            self._hold_images(request, stop, step)
        step.chunks[request.request_id] = ScheduledChunk(
            request.request_id, start, stop - start, blocks, restarted, stop == request.num_tokens
        )
        step.tokens_left = max(0, step.tokens_left - (stop - start))
        step.has_prefill |= stop - start > 1

    def _preempt(self, request: Request, step: _Step) -> None:
        """Take a running request's blocks, and its chunk if it has one; it computes all again later."""
        chunk = step.chunks.pop(request.request_id, None)
        if chunk is not None:
            step.tokens_left += chunk.num_tokens
        step.preempted.append(request.request_id)
        self._running.remove(request)
        self._release(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._enqueue(request)

    # -- limits of a chunk ----------------------------------------------------------------------

    def _chunk_stop(self, request: Request, start: int, step: _Step) -> int:
        """Where a chunk that begins at `start` may end in this step; `start` itself if it has to wait."""
        stop = min(request.num_tokens, start + step.tokens_left)
        if stop <= start or start >= request.num_prompt:
            return max(stop, start)
        stop = before_span(request.spans, stop)
        if stop <= start:
            # The first prefill of a step may exceed the budget, for a span longer than it (or than what the
            # decodes have left of it) would never be computed otherwise.
            if step.has_prefill:
                return start
            stop = span_stop(request.spans, start)
        return self._stop_for_images(request, start, stop, step)

    def _stop_for_images(self, request: Request, start: int, stop: int, step: _Step) -> int:
        """Cut before the first image that can not be encoded in this step."""
        images_left, nbytes = step.images_left, 0
        seen: set[str] = set()
        for position in range(request.next_image, len(request.images)):
            image = request.images[position]
            if image.first_row >= stop:
                break
            entry = self.ledger.get(image.key)
            if image.last_row < start or image.key in seen or (entry is not None and entry.refcount > 0):
                continue
            seen.add(image.key)
            nbytes += self.ledger.estimate(image.num_rows) if entry is None else entry.nbytes
            images_left -= entry is None
            if images_left >= 0 and self.ledger.fits(nbytes):
                continue
            cut = before_span(request.spans, image.first_row)
            if cut > start:
                return cut
            if step.encode or self.ledger.held_bytes:
                return start
            # Nobody else holds or encodes anything: what one request needs at once is let through, or an
            # image (or a span of several) over the budget would wait for ever.
            return min(stop, max(image.stop, span_stop(request.spans, start)))
        return stop

    # -- images ---------------------------------------------------------------------------------

    def _hold_images(self, request: Request, stop: int, step: _Step) -> None:
        """Hold every image with rows before `stop`; those without an entry are encoded in this step."""
        wanted = []
        for position in range(request.next_image, len(request.images)):
            if request.images[position].first_row >= stop:
                break
            if position not in request.held:
                wanted.append(position)
        self.num_image_uses += len(wanted)
        # Those that exist first: making room for a new one must not drop them.
        wanted.sort(key=lambda position: request.images[position].key not in self.ledger)
        for position in wanted:
            image = request.images[position]
            entry = self.ledger.get(image.key)
            if entry is None:
                self._drop_images(self.ledger.estimate(image.num_rows), step)
                entry = self.ledger.reserve(image.key, image.num_rows)
                step.encode.append(ImageToEncode(request.request_id, image.index, image.key))
                step.images_left -= 1
                self.num_image_encodes += 1
            self.ledger.hold(entry)
            request.held[position] = entry

    def _drop_images(self, wanted: int, step: _Step) -> None:
        dropped = self.ledger.trim(wanted)
        step.dropped += dropped
        if dropped and step.encode:
            # An image that a request preempted in this very step was to have encoded may be among them.
            step.encode = [image for image in step.encode if image.key not in dropped]

    def _release_computed_images(self, request: Request) -> None:
        while request.next_image < len(request.images):
            if request.images[request.next_image].last_row >= request.num_computed:
                return
            entry = request.held.pop(request.next_image, None)
            if entry is not None:
                self.ledger.release(entry)
            request.next_image += 1

    # -- blocks ---------------------------------------------------------------------------------

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.block_size)

    def _allocate(self, count: int) -> list[int]:
        """Take blocks that are available, evicting cached ones if too few are free."""
        missing = count - self.pool.num_free
        if missing > 0:
            for block in self.pool.evict(missing):
                self._forget_block(block)
        return self.pool.allocate(count)

    def _forget_block(self, block: int) -> None:
        """Nobody finds `block`, or what was computed after it, any more."""
        if self.index is not None:
            for gone in self.index.forget(block):
                self.pool.forget(gone)

    def _find_prefix(self, request: Request) -> list[CachedBlock]:
        """Blocks that hold the request's beginning; at least one token is left, and no span is cut."""
        hits: list[CachedBlock] = []
        if self.index is None or request.chain is None:
            return hits
        size = self.limits.block_size
        entry = self.index.root
        for stop in range(size, request.num_tokens, size):
            found = self.index.find(entry, request.content.content(request.token_ids, stop - size, stop))
            if found is None:
                break
            hits.append(found)
            entry = found
        while (stop := len(hits) * size) != (cut := before_span(request.spans, stop)):
            del hits[cut // size :]
        return hits

    def _register_full_blocks(self, request: Request) -> None:
        """Let others find the blocks that are full now: their keys and values have been written."""
        size = self.limits.block_size
        full = request.num_computed // size
        while request.num_registered < full and self.index is not None and request.chain is not None:
            number = request.num_registered
            block = request.block_table[number]
            content = request.content.content(request.token_ids, number * size, (number + 1) * size)
            request.chain = self.index.insert(request.chain, content, block)
            if request.chain is not None and request.chain.block == block:
                self.pool.keep(block)
            request.num_registered += 1

    # -- lines ----------------------------------------------------------------------------------

    def _enqueue(self, request: Request) -> None:
        """Into the line, whose head is the list's end."""
        request.state = RequestState.WAITING
        insort(self._waiting, request, key=lambda r: (-r.order[0], -r.order[1]))
        self._blocked_until = 0

    def _release(self, request: Request) -> None:
        """Give up everything a request holds; it is as if it had not started."""
        self.pool.release(reversed(request.block_table))
        request.block_table = []
        for entry in request.held.values():
            self.ledger.release(entry)
        request.held = {}
        request.next_image = request.num_computed = request.num_registered = 0
        request.chain = self.index.root if self.index is not None and request.shareable else None

    def check_integrity(self) -> None:
        """All books agree with each other.

        Raises:
            RuntimeError: With the first contradiction found.
        """
        self.pool.check_integrity()
        self.ledger.check_integrity()
        holders: Counter[int] = Counter()
        for request in self._requests.values():
            holders.update(request.block_table)
        for block in range(self.pool.num_blocks):
            if self.pool.refcount(block) != holders[block]:
                raise RuntimeError(f"block {block}: {holders[block]} hold it, counted {self.pool.refcount(block)}")
            if self.index is not None and self.pool.is_kept(block) != (block in self.index):
                raise RuntimeError(f"block {block}: kept and registered differ")
        if self.index is not None:
            self.index.check_integrity()
        uses = Counter(id(entry) for request in self._requests.values() for entry in request.held.values())
        if sum(uses.values()) != self.ledger.num_uses:
            raise RuntimeError(f"requests hold {sum(uses.values())} images, the ledger counts {self.ledger.num_uses}")
        if len(self._requests) != len(self._waiting) + len(self._running):
            raise RuntimeError("a request is in no line, or in two")


def before_span(spans: Sequence[tuple[int, int]], stop: int) -> int:
    """`stop`, or the start of the both-way span that it would cut."""
    for first, last in spans:
        if first < stop < last:
            return first
    return stop


def span_stop(spans: Sequence[tuple[int, int]], start: int) -> int:
    """Where the span that `start` lies in ends; `start` itself outside of spans."""
    for first, last in spans:
        if first <= start < last:
            return last
    return start
