"""Drives a scheduler without a model: a runner of ints that checks all it is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmserve.cache.groups import NO_BLOCK
from mmserve.cache.prefix_index import PrefixIndex
from mmserve.engine.admission import plan_request
from mmserve.engine.batch import NewRequest, SampledToken, ScheduledBatch, StepOutput
from mmserve.engine.request import Request
from mmserve.engine.scheduler import Scheduler, SchedulerLimits
from mmserve.model.interface import PromptPlan
from mmserve.types import SamplingParams
from processors.types import ImageItem, PlaceholderRange, ProcessedPrompt

BYTES_PER_ROW = 10


def image(offset: int, length: int, key: str) -> ImageItem:
    """An image without tensors."""
    return ImageItem(key, PlaceholderRange(offset, length), {}, (1, 1))


class Driver:
    """A scheduler and its checking runner; tokens are 1000, 1001, ... in the order of sampling."""

    def __init__(self, **limits: Any) -> None:
        defaults = {
            "block_size": 4,
            "num_blocks": 32,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 16,
            "max_model_len": 10**6,
            "max_images_per_step": 2,
            "encoder_cache_memory": 10**6,
        }
        self.limits = SchedulerLimits(**{**defaults, **limits})
        self.groups = self.limits.groups
        index = PrefixIndex("model", num_groups=len(self.groups), rooted=self.groups[0].window is None)
        self.scheduler = Scheduler(self.limits, index)
        self.requests: dict[str, Request] = {}
        self.wanted: dict[str, int] = {}
        self.batches: list[ScheduledBatch] = []
        self.broken_images: set[str] = set()
        self.images: set[str] = set()
        self.encodes: list[str] = []
        self._tables: dict[str, list[list[int]]] = {}
        self._computed: dict[str, int] = {}
        self._known: set[str] = set()

    def add(
        self,
        name: str,
        token_ids: Sequence[int],
        images: Sequence[ImageItem] = (),
        *,
        max_tokens: int = 3,
        both_ways: bool = False,
        priority: int = 0,
        arrival: int | None = None,
    ) -> Request:
        """Put a request in line."""
        prompt = ProcessedPrompt(tuple(token_ids), tuple(images))
        spans = tuple((i.range.offset, i.range.end) for i in images) if both_ways else ()
        plan = PromptPlan(positions=None, spans=spans)  # type: ignore[arg-type]
        arrival = len(self.requests) if arrival is None else arrival
        self.scheduler.check_admission(len(token_ids), max_tokens)
        request = plan_request(name, prompt, plan, priority=priority, arrival=arrival)
        self.requests[name] = request
        self.wanted[name] = max_tokens
        self.scheduler.add(request, NewRequest(name, prompt, plan, SamplingParams(max_tokens=max_tokens)))
        return request

    def step(self) -> ScheduledBatch:
        """One step, everything checked; requests with all their tokens finish."""
        batch = self.scheduler.schedule()
        self.batches.append(batch)
        self._check(batch)
        encoded = [i.key for i in batch.encode if i.key not in self.broken_images]
        self.images |= set(encoded)
        self.encodes += [i.key for i in batch.encode]
        failed = {c.request_id: None for c in batch.chunks if not self._images_of(c.request_id) <= self.images}
        rows = {i.key: self.requests[i.request_id].images for i in batch.encode}
        output = StepOutput(
            sampled={
                c.request_id: SampledToken(1000 + self.requests[c.request_id].num_tokens)
                for c in batch.chunks
                if c.samples and c.request_id not in failed
            },
            failed=failed,  # type: ignore[arg-type]
            image_bytes={key: BYTES_PER_ROW * next(e.num_rows for e in rows[key] if e.key == key) for key in encoded},
        )
        self.scheduler.update(batch, output)
        for name in output.sampled:
            if self.requests[name].num_tokens - self.requests[name].num_prompt >= self.wanted[name]:
                self.scheduler.finish(name)
        for name in failed:
            self.scheduler.finish(name, poisoned=True)
        self.scheduler.check_integrity()
        return batch

    def run(self, limit: int = 2000) -> list[ScheduledBatch]:
        """Step until all is done."""
        first = len(self.batches)
        while self.scheduler.has_work():
            assert len(self.batches) - first < limit, "no end in sight"
            batch = self.step()
            assert batch.chunks or batch.finished, "a step without work"
        return self.batches[first:]

    def _images_of(self, name: str) -> set[str]:
        """Keys that the request's last chunk needs."""
        chunk = next(c for c in self.batches[-1].chunks if c.request_id == name)
        stop = chunk.start + chunk.num_tokens
        extents = self.requests[name].images
        return {e.key for e in extents if e.first_row < stop and e.last_row >= chunk.start}

    def _check(self, batch: ScheduledBatch) -> None:
        size = self.limits.block_size
        for name in batch.finished:
            self._tables.pop(name, None)
            self._computed.pop(name, None)
            self._known.remove(name)
        for name in batch.preempted:
            del self._tables[name], self._computed[name]
        for key in batch.dropped_images:
            self.images.remove(key)
        self._known |= {new.request_id for new in batch.new}
        assert not {i.key for i in batch.encode} & self.images
        assert len({i.key for i in batch.encode}) == len(batch.encode)
        for chunk in batch.chunks:
            name, request = chunk.request_id, self.requests[chunk.request_id]
            assert name in self._known
            if chunk.restarted:
                assert name not in self._tables
                self._tables[name], self._computed[name] = [[] for _ in self.groups], chunk.start
            stop = chunk.start + chunk.num_tokens
            assert chunk.num_tokens >= 1
            assert chunk.start == self._computed[name]
            assert stop <= request.num_tokens
            assert chunk.samples == (stop == request.num_tokens)
            for group, table, new in zip(self.groups, self._tables[name], chunk.block_ids, strict=True):
                table += new
                first = group.first_needed(chunk.start, size)
                table[:first] = [NO_BLOCK] * first
                assert len(table) * size >= stop
                assert NO_BLOCK not in table[first:]
            assert self._tables[name] == request.tables
            self._computed[name] = stop
            for first, last in request.spans:
                assert not first < chunk.start < last
                assert not first < stop < last
            assert self._images_of(name) <= self.images | {i.key for i in batch.encode}
        self._check_budgets(batch)
        self._check_writers(batch)

    def _check_budgets(self, batch: ScheduledBatch) -> None:
        total = sum(c.num_tokens for c in batch.chunks)
        assert len({c.request_id for c in batch.chunks}) == len(batch.chunks) <= self.limits.max_num_seqs
        if total > self.limits.max_num_batched_tokens:
            over = [c for c in batch.chunks if c.num_tokens > 1]
            spans = self.requests[over[0].request_id].spans
            assert (over[0].start, over[0].start + over[0].num_tokens) in spans

    def _check_writers(self, batch: ScheduledBatch) -> None:
        """No two requests write to one block, and nobody writes to a block that another reads."""
        size = self.limits.block_size
        written: dict[int, str] = {}
        for chunk in batch.chunks:
            first, last = chunk.start // size, (chunk.start + chunk.num_tokens - 1) // size
            for table in self._tables[chunk.request_id]:
                for block in table[first : last + 1]:
                    assert block not in written
                    written[block] = chunk.request_id
        now = {chunk.request_id for chunk in batch.chunks}
        for name, tables in self._tables.items():
            # What is not in this step has given back what its next token does not see.
            query = self._computed[name] - (name in now)
            needed = [group.first_needed(query, size) for group in self.groups]
            for group, table in enumerate(tables):
                for block in table[needed[group] :]:
                    assert written.get(block, name) == name
