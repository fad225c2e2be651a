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
from collections.abc import Sequence

import torch

from mmserve.cache.tensors import allocate
from mmserve.engine.batch import ImageToEncode, SampledToken, ScheduledBatch, ScheduledChunk, StepOutput
from mmserve.engine.packing import BlockTables, SequenceRecord, pack
from mmserve.engine.sampler import Sampler
from mmserve.errors import ModelOutputError, RequestError
from mmserve.model.interface import ImageRows, Model

__all__ = ["ModelRunner"]


class ModelRunner:
    """A model, its cache and everything that a step needs.

    Args:
        model: Loaded; its cache is allocated and bound here.
        num_blocks: Cache blocks.
        block_size: Tokens in a block.
        max_num_seqs: Most requests with blocks at one time.
        max_model_len: Most tokens of one request.
        device: Where the model computes.
    """

    def __init__(
        self,
        model: Model,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self._model = model
        self._device = torch.device(device)
        spec = model.cache_spec()
        model.bind_cache(
            allocate(spec.layers, num_blocks=num_blocks, block_size=block_size, dtype=spec.dtype, device=self._device)
        )
        self._sampler = Sampler(model.vocab_size, model.forbidden_token_ids, self._device)
        self._tables = BlockTables(max_num_seqs, max_model_len, block_size)
        self._records: dict[str, SequenceRecord] = {}
        self._images: dict[str, ImageRows] = {}

    @property
    def num_requests(self) -> int:
        """Requests that are remembered."""
        return len(self._records)

    @property
    def image_keys(self) -> frozenset[str]:
        """Keys of the images whose rows are kept."""
        return frozenset(self._images)

    @torch.inference_mode()
    def run(self, batch: ScheduledBatch) -> StepOutput:
        """Do one step.

        An image that can not be encoded, or logits that are not finite, fail their own request. Anything else
        that goes wrong is raised: no single request can be blamed for it.
        """
        self._take_in(batch)
        failed: dict[str, RequestError] = {}
        image_bytes, seconds = self._encode(batch.encode, failed)
        chunks = [chunk for chunk in batch.chunks if self._has_its_images(chunk, failed)]
        for chunk in batch.chunks:
            record = self._records[chunk.request_id]
            if chunk.restarted:
                record.row = self._tables.take()
            self._tables.extend(record.row, chunk.block_ids)
        sampled: dict[str, SampledToken] = {}
        # A model with state of its own runs each request by itself, so that one failing harms no other.
        for group in ([chunk] for chunk in chunks) if self._model.needs_sequences else [chunks] * bool(chunks):
            self._forward(group, sampled, failed)
        return StepOutput(sampled, failed, image_bytes, seconds)

    # -- coming and going -----------------------------------------------------------------------

    def _take_in(self, batch: ScheduledBatch) -> None:
        for request_id in (*batch.finished, *batch.preempted):
            self._records[request_id].row = self._tables.give_back(self._records[request_id].row)
        for request_id in batch.finished:
            del self._records[request_id]
        if self._model.needs_sequences and (batch.finished or batch.preempted):
            self._model.release((*batch.finished, *batch.preempted))
        for key in batch.dropped_images:
            self._images.pop(key, None)
        for new in batch.new:
            self._records[new.request_id] = SequenceRecord(new, self._model.vocab_size, self._device)

    # -- images ---------------------------------------------------------------------------------

    def _encode(
        self, wanted: Sequence[ImageToEncode], failed: dict[str, RequestError]
    ) -> tuple[dict[str, int], dict[str, float]]:
        """Encode the step's new images; returns bytes by key and seconds by request."""
        if not wanted:
            return {}, {}
        items = [self._records[image.request_id].prompt.images[image.index] for image in wanted]
        began = time.perf_counter()
        results = self._encode_apart(items)
        share = (time.perf_counter() - began) / len(wanted)
        nbytes: dict[str, int] = {}
        seconds: dict[str, float] = {}
        for image, item, result in zip(wanted, items, results, strict=True):
            seconds[image.request_id] = seconds.get(image.request_id, 0.0) + share
            if isinstance(result, ImageRows):
                error = _row_error(result, image.index, item.range.num_embeds)
                if error is None:
                    self._images[image.key] = result
                    nbytes[image.key] = result.nbytes()
                    continue
                result = error
            failed.setdefault(image.request_id, _as_request_error(result, image.index))
        return nbytes, seconds

    def _encode_apart(self, items: Sequence) -> list[ImageRows | Exception]:
        """`model.encode`; if it raises for a batch, each image by itself, so that only the culprit fails."""
        try:
            return self._model.encode(items)
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

    # -- forward --------------------------------------------------------------------------------

    def _forward(
        self, chunks: Sequence[ScheduledChunk], sampled: dict[str, SampledToken], failed: dict[str, RequestError]
    ) -> None:
        records = [self._records[chunk.request_id] for chunk in chunks]
        packed = pack(
            chunks, records, self._tables, self._images, self._device, with_sequences=self._model.needs_sequences
        )
        names = [chunk.request_id for chunk in chunks if chunk.samples]
        try:
            logits = self._model.forward(packed)
        except RequestError as error:
            if len(chunks) > 1:
                raise
            failed[chunks[0].request_id] = error
            return
        if not names:
            return
        # The largest logit is finite unless one is NaN or +inf, or all are -inf.
        finite = torch.isfinite(logits.amax(dim=-1))
        if not bool(finite.all()):
            good = finite.tolist()
            for name, fine in zip(names, good, strict=True):
                if not fine:
                    failed[name] = ModelOutputError("the model's logits are not finite")
            logits = logits[finite]
            names = [name for name, fine in zip(names, good, strict=True) if fine]
            if not names:
                return
        results = self._sampler.sample(logits, [self._records[name].sampling for name in names])
        for name, result in zip(names, results, strict=True):
            if isinstance(result, SampledToken):
                self._records[name].append(result.token_id)
                sampled[name] = result
            else:
                failed[name] = result


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


def _as_request_error(error: Exception, index: int) -> RequestError:
    if isinstance(error, RequestError):
        return error
    wrapped = ModelOutputError(f"image {index + 1} could not be encoded: {type(error).__name__}: {str(error)[:200]}")
    wrapped.__cause__ = error
    return wrapped
