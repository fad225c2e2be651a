"""Runs one step on one device: images, packed forward, tokens. Decides nothing: it does what the batch says.

What it keeps of a request (ids, positions, place in the block table) arrives once and then grows by what each
step adds, so a decoding request costs the same however long its prompt is::

    rows of one table, a running request each        packed batch of a step
    row 0   [ 7  3  9  .  . ]  blocks                decode  decode  chunk of a prompt
    row 1   [ 2  .  .  .  . ]                        ┌─┬─┬─────────────────────────┐
    row 2   [ 5  8  .  .  . ]                        └─┴─┴─────────────────────────┘
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from mmserve.cache.groups import CacheGroup
from mmserve.cache.tensors import allocate
from mmserve.engine.batch import (
    BlockCopy,
    ImageToEncode,
    PromptReport,
    SampledToken,
    ScheduledBatch,
    ScheduledChunk,
    StepOutput,
)
from mmserve.engine.packing import BlockTables, SequenceRecord, pack
from mmserve.engine.sampler import Sampler, describe_tokens
from mmserve.engine.scheduler import SchedulerLimits
from mmserve.errors import ModelOutputError, RequestError
from mmserve.model.interface import ImageRows, Model
from mmserve.model.memory import give_back_after
from mmserve.parallel.group import ExchangeError
from processors.types import ImageItem

__all__ = ["ModelRunner"]


@dataclass(slots=True)
class _Output:
    """A `StepOutput` being put together."""

    sampled: dict[str, SampledToken] = field(default_factory=dict)
    failed: dict[str, RequestError] = field(default_factory=dict)
    prompt_reports: dict[str, PromptReport] = field(default_factory=dict)
    image_bytes: dict[str, int] = field(default_factory=dict)
    encode_seconds: dict[str, float] = field(default_factory=dict)


class ModelRunner:
    """A model, its cache and everything that a step needs.

    Args:
        model: Loaded; its cache is allocated and bound here.
        num_blocks: Blocks that requests get; if layers have a window, there is one more, for what they have given back.
        groups: The cache's groups, those of the model's layout.
        block_size: Tokens in a block.
        max_num_seqs: Most requests with blocks at one time.
        max_model_len: Most tokens of one request.
        unsampled: Ids that are never sampled; None: the model's placeholders.
        device: Where the model computes.
        samples: Whether tokens are chosen here; if not, `learn` tells of those that another rank chose.
        encodes: Whether images are encoded here; if not, an earlier pipeline stage has their rows.
    """

    def __init__(
        self,
        model: Model,
        *,
        num_blocks: int,
        groups: Sequence[CacheGroup],
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        unsampled: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
        samples: bool = True,
        encodes: bool = True,
    ) -> None:
        self._model = model
        self._samples = samples
        self._encodes = encodes
        self._unlearned: deque[tuple[ScheduledChunk, ...]] = deque()
        self._device = torch.device(device)
        spec = model.cache_spec()
        layout = spec.layout()
        shapes = {slot: layer for layer, (_, slot) in zip(spec.layers, layout.places, strict=True)}
        self._caches = allocate(
            [shapes[slot] for slot in range(layout.num_slots)],
            num_blocks=num_blocks + _num_spare(groups),
            block_size=block_size,
            dtype=spec.dtype,
            device=self._device,
        )
        self._bound = [self._caches[slot] for _, slot in layout.places]
        model.bind_cache(self._bound)
        unsampled = model.forbidden_token_ids if unsampled is None else unsampled
        self._sampler = Sampler(model.vocab_size, unsampled, self._device)
        self._tables = BlockTables(max_num_seqs, max_model_len, block_size, groups, num_blocks)
        self._records: dict[str, SequenceRecord] = {}
        self._images: dict[str, ImageRows] = {}
        self._closed = False

    @classmethod
    def for_limits(
        cls,
        model: Model,
        limits: SchedulerLimits,
        *,
        unsampled: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
        samples: bool = True,
        encodes: bool = True,
    ) -> ModelRunner:
        """A runner of what a scheduler with these limits asks for; the other arguments as above."""
        return cls(
            model,
            num_blocks=limits.num_blocks,
            groups=limits.groups,
            block_size=limits.block_size,
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            unsampled=unsampled,
            device=device,
            samples=samples,
            encodes=encodes,
        )

    @property
    def num_requests(self) -> int:
        """Requests that are remembered."""
        return len(self._records)

    @property
    def image_keys(self) -> frozenset[str]:
        """Keys of the images whose rows are kept."""
        return frozenset(self._images)

    @torch.inference_mode()
    def run(
        self,
        batch: ScheduledBatch,
        *,
        failed: Mapping[str, RequestError] | None = None,
        announce: Callable[[Mapping[str, RequestError]], None] | None = None,
    ) -> StepOutput:
        """Do one step.

        An image that can not be encoded, or logits that are not finite, fail their own request. Anything else
        that goes wrong is raised: no single request can be blamed for it.

        Args:
            batch: What to do.
            failed: On a later pipeline stage: requests that have failed on the first one, in this step.
            announce: On the first stage: called with those, after images are encoded and before the forward.
        """
        self._take_in(batch)
        output = _Output(failed=dict(failed or {}))
        if self._encodes:
            self._encode(batch.encode, output)
        else:
            self._expect([image for image in batch.encode if image.request_id not in output.failed])
        chunks = [chunk for chunk in batch.chunks if self._has_its_images(chunk, output.failed)]
        self._let_go_of_pixels(chunks)
        self._copy_blocks(batch.copies)
        self._scrub_blocks(batch.scrubbed)
        for chunk in batch.chunks:
            record = self._records[chunk.request_id]
            if chunk.restarted:
                record.row = self._tables.take()
            self._tables.extend(record.row, chunk.start, chunk.block_ids)
        if announce is not None:
            announce(output.failed)
        if not self._samples:
            self._unlearned.append(batch.chunks)
        # A model with state of its own runs each request by itself, so that one failing harms no other.
        for group in ([chunk] for chunk in chunks) if self._model.needs_sequences else [chunks] * bool(chunks):
            self._forward(group, output)
        return StepOutput(
            output.sampled, output.failed, output.prompt_reports, output.image_bytes, output.encode_seconds
        )

    @torch.inference_mode()
    def learn(self, sampled: Mapping[str, int]) -> None:
        """The tokens that another rank chose in the oldest step that this one has not heard of.

        Args:
            sampled: Request id -> its token, as in `StepOutput.sampled`.
        """
        for chunk in self._unlearned.popleft():
            if not chunk.samples or chunk.request_id not in sampled:
                continue
            record = self._records[chunk.request_id]
            for member in (record, *(self._begin_forks(record) if chunk.forks else ())):
                member.append(sampled[member.request_id])

    def touch_cache(self) -> None:
        """Write all of the cache once: zeros never written take no memory of the machine yet."""
        for cache in self._caches:
            cache.key.zero_()
            cache.value.zero_()

    def close(self) -> None:
        """Let go of the model, which keeps nothing of cache and requests, and of image rows. No step comes after it;
        twice is fine."""
        if self._closed:
            return
        self._closed = True
        model, request_ids, bound = self._model, tuple(self._records), self._bound
        del self._model
        self._records.clear()
        self._images.clear()
        self._bound, self._caches = [], []
        try:
            if model.needs_sequences and request_ids:
                model.release(request_ids)
        finally:
            model.unbind_cache(bound)

    # -- coming and going -----------------------------------------------------------------------

    def _take_in(self, batch: ScheduledBatch) -> None:
        for request_id in batch.preempted:
            record = self._records[request_id]
            record.row = self._tables.give_back(record.row)
        for request_id in batch.finished:
            self._forget(request_id)
        if self._model.needs_sequences and (batch.finished or batch.preempted):
            self._model.release((*batch.finished, *batch.preempted))
        for key in batch.dropped_images:
            self._images.pop(key, None)
        for new in batch.new:
            self._records[new.request_id] = SequenceRecord(new, self._model.vocab_size, self._device)

    def _forget(self, request_id: str) -> None:
        self._tables.give_back(self._records.pop(request_id).row)

    def _scrub_blocks(self, blocks: Sequence[int]) -> None:
        if blocks:
            where = torch.tensor(blocks, device=self._device)
            for cache in self._caches:
                cache.key.index_fill_(0, where, 0.0)
                cache.value.index_fill_(0, where, 0.0)

    def _copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        if not copies:
            return
        sources = torch.tensor([copy.source for copy in copies], device=self._device)
        targets = torch.tensor([copy.target for copy in copies], device=self._device)
        for cache in self._caches:
            cache.key[targets] = cache.key[sources]
            cache.value[targets] = cache.value[sources]
        for copy in copies:
            self._tables.replace(self._records[copy.request_id].row, copy.group, copy.index, copy.target)

    def _begin_forks(self, parent: SequenceRecord) -> list[SequenceRecord]:
        """Records of the parent's forks, which have computed what it has."""
        forks = []
        for fork in parent.new.forks:
            new = replace(parent.new, request_id=fork.request_id, seed=fork.seed, forks=())
            record = SequenceRecord(new, self._model.vocab_size, self._device)
            record.kept_rows = dict(parent.kept_rows)
            record.row = self._tables.take()
            self._tables.copy(parent.row, record.row)
            self._records[fork.request_id] = record
            forks.append(record)
        return forks

    # -- images ---------------------------------------------------------------------------------

    def _encode(self, wanted: Sequence[ImageToEncode], output: _Output) -> None:
        """Encode the step's new images."""
        if not wanted:
            return
        records = [self._records[image.request_id] for image in wanted]
        items = [record.prompt.images[image.index] for record, image in zip(records, wanted, strict=True)]
        kept = [record.kept_rows.get(image.index) for record, image in zip(records, wanted, strict=True)]
        began = time.perf_counter()
        new = iter(self._encode_apart([item for item, rows in zip(items, kept, strict=True) if rows is None]))
        results = [next(new) if rows is None else rows.to(self._device) for rows in kept]
        share = (time.perf_counter() - began) / len(wanted)
        seconds = output.encode_seconds
        for image, item, result in zip(wanted, items, results, strict=True):
            seconds[image.request_id] = seconds.get(image.request_id, 0.0) + share
            if isinstance(result, ImageRows):
                error = _row_error(result, image.index, item.range.num_embeds)
                if error is None:
                    self._images[image.key] = owned = _owned(result)
                    output.image_bytes[image.key] = owned.nbytes()
                    continue
                result = error
            output.failed.setdefault(image.request_id, _as_request_error(result, image.index))

    def _expect(self, wanted: Sequence[ImageToEncode]) -> None:
        """Images whose rows an earlier stage places: here they only have to be as many."""
        for image in wanted:
            item = self._records[image.request_id].prompt.images[image.index]
            self._images[image.key] = ImageRows(torch.empty(item.range.num_embeds, 0, device=self._device))

    def _encode_apart(self, items: Sequence[ImageItem]) -> list[ImageRows | Exception]:
        """`model.encode`; if it raises for a batch, each image by itself, so that only the culprit fails."""
        if not items:
            return []
        try:
            return self._model.encode(items)
        except ExchangeError:  # a rank is gone: no image's fault
            raise
        except Exception as error:  # noqa: BLE001 - the border of a request's blast radius
            if len(items) == 1:
                return [error]
        return [result for item in items for result in self._encode_apart([item])]

    def _has_its_images(self, chunk: ScheduledChunk, failed: dict[str, RequestError]) -> bool:
        """Whether all rows that the chunk places are here; else its request fails (its image did, in this step)."""
        if chunk.request_id in failed:
            return False
        record = self._records[chunk.request_id]
        for image in record.images_between(chunk.start, chunk.start + chunk.num_tokens):
            if image.key not in self._images:
                failed[chunk.request_id] = ModelOutputError(
                    f"image {image.index + 1} could not be encoded (it is the same picture as another request's)"
                )
                return False
        return True

    def _let_go_of_pixels(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Of the images that are placed in this step: their rows are here, and are kept for as long as the request."""
        freed = 0
        for chunk in chunks:
            record = self._records[chunk.request_id]
            for image in record.images_between(chunk.start, chunk.start + chunk.num_tokens):
                freed += record.keep_rows(image.index, self._images[image.key])
        give_back_after(freed)

    # -- forward --------------------------------------------------------------------------------

    def _forward(self, chunks: Sequence[ScheduledChunk], output: _Output) -> None:
        records = [self._records[chunk.request_id] for chunk in chunks]
        packed = pack(
            chunks, records, self._tables, self._images, self._device, with_sequences=self._model.needs_sequences
        )
        try:
            logits = self._model.forward(packed)
            if not self._samples:
                return
            wanted = len(packed.logit_indices)
            if len(logits) != wanted:
                raise ModelOutputError(f"the model gave {len(logits)} rows of logits, but {wanted} were asked for")
        except RequestError as error:
            if len(chunks) > 1:
                raise
            output.failed[chunks[0].request_id] = error
            return
        self._sample(logits, chunks, output)

    def _sample(self, logits: torch.Tensor, chunks: Sequence[ScheduledChunk], output: _Output) -> None:
        """Report on prompts, and choose a token for each chunk that wants one and for each fork that begins with it."""
        rows: list[int] = []
        groups: list[list[SequenceRecord]] = []
        # The largest logit is finite unless one is NaN or +inf, or all are -inf.
        finite = torch.isfinite(logits.amax(dim=-1)).tolist() if len(logits) else []
        row = 0
        for chunk in chunks:
            record = self._records[chunk.request_id]
            first, row = row, row + record.num_report_rows(chunk)
            last = row + chunk.samples
            if not all(finite[first:last]):
                output.failed[record.request_id] = ModelOutputError("the model's logits are not finite")
            else:
                if row > first:
                    output.prompt_reports[record.request_id] = _report(logits[first:row], chunk.start + 1, record)
                if chunk.samples:
                    groups.append([record, *self._begin_forks(record)] if chunk.forks else [record])
                    rows += [row] * len(groups[-1])
            row = last
        if not rows:
            return
        if rows != list(range(len(logits))):
            logits = logits[rows]
        results = iter(self._sampler.sample(logits, [record.sampling for group in groups for record in group]))
        for group in groups:
            for record, result in [(record, next(results)) for record in group]:
                if isinstance(result, SampledToken):
                    record.append(result.token_id)
                    output.sampled[record.request_id] = result
                else:
                    output.failed[group[0].request_id] = result
            if group[0].request_id in output.failed:
                for record in group:
                    output.sampled.pop(record.request_id, None)
                for record in group[1:]:
                    self._forget(record.request_id)


def _num_spare(groups: Sequence[CacheGroup]) -> int:
    return int(any(group.window is not None for group in groups))


def _report(logits: torch.Tensor, start: int, record: SequenceRecord) -> PromptReport:
    """What `logits` [R, V] say of prompt tokens start..start+R-1."""
    count = record.new.sampling.prompt_logprobs or 0
    ids = record.token_ids[start : start + len(logits)].tolist()
    return PromptReport(start, tuple(describe_tokens(torch.log_softmax(logits, dim=-1), ids, [count] * len(ids))))


def _row_error(rows: ImageRows, index: int, expected: int) -> ModelOutputError | None:
    counts = {"rows": rows.rows.shape[0]} | {name: extra.shape[-2] for name, extra in rows.extra.items()}
    for name, count in counts.items():
        if count != expected:
            return ModelOutputError(
                f"image {index + 1} takes {expected} feature rows, but the vision tower gave {count} ({name})"
            )
    if not bool(torch.isfinite(rows.rows).all()):
        return ModelOutputError(f"the features of image {index + 1} are not finite")
    return None


def _owned(rows: ImageRows) -> ImageRows:
    """The same rows, in storage that holds nothing else: a view would keep a whole batch of images alive."""

    def own(tensor: torch.Tensor) -> torch.Tensor:
        used = tensor.numel() * tensor.element_size()
        return tensor.clone() if tensor.untyped_storage().nbytes() > used else tensor

    return ImageRows(own(rows.rows), {name: own(extra) for name, extra in rows.extra.items()})


def _as_request_error(error: Exception, index: int) -> RequestError:
    if isinstance(error, RequestError):
        return error
    wrapped = ModelOutputError(f"image {index + 1} could not be encoded: {type(error).__name__}: {str(error)[:200]}")
    wrapped.__cause__ = error
    return wrapped
