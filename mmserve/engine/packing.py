"""Builds the packed batch of a step from what the runner remembers of each request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from mmserve.attention.interface import AttentionMetadata
from mmserve.cache.groups import CacheGroup
from mmserve.engine.batch import NewRequest, ScheduledChunk
from mmserve.engine.sampler import SequenceState
from mmserve.model.interface import ImageRows, PackedBatch, RowPlacement, SequenceInput
from processors.types import ProcessedPrompt

__all__ = ["NO_ROW", "BlockTables", "ImageTargets", "SequenceRecord", "pack"]

NO_ROW = -1
"""In place of a row, for a request without blocks."""


class BlockTables:
    """The block tables of all requests that have blocks, as rows of one int32 array a cache group.

    Where a table has no block any more stands a spare one, which nobody writes to: backends read all of a table and
    give what lies before the window no weight, and zero times what another request left there may be NaN.

    Args:
        num_rows: Requests with blocks at one time.
        max_model_len: Most tokens of one.
        block_size: Tokens in a block.
        groups: The cache's groups.
        spare: The spare block.
    """

    def __init__(
        self, num_rows: int, max_model_len: int, block_size: int, groups: Sequence[CacheGroup], spare: int
    ) -> None:
        self.block_size = block_size
        self.groups = tuple(groups)
        self._spare = spare
        shape = (num_rows, -(-max_model_len // block_size))
        self.blocks: list[npt.NDArray[np.int32]] = [np.zeros(shape, dtype=np.int32) for _ in groups]
        self.lengths = [[0] * len(self.groups) for _ in range(num_rows)]
        self._given_back = [[0] * len(self.groups) for _ in range(num_rows)]
        self._free = list(range(num_rows - 1, -1, -1))

    def take(self) -> int:
        """An empty row."""
        return self._free.pop()

    def give_back(self, row: int) -> int:
        """The request of this row has lost its blocks. Returns NO_ROW, which may be given back again."""
        if row != NO_ROW:
            self.lengths[row] = [0] * len(self.groups)
            self._given_back[row] = [0] * len(self.groups)
            self._free.append(row)
        return NO_ROW

    def replace(self, row: int, group: int, index: int, block: int) -> None:
        """Put another block in a row's place."""
        self.blocks[group][row, index] = block

    def copy(self, source: int, target: int) -> None:
        """Give an empty row the blocks of another."""
        self.lengths[target] = list(self.lengths[source])
        self._given_back[target] = list(self._given_back[source])
        for blocks, length in zip(self.blocks, self.lengths[source], strict=True):
            blocks[target, :length] = blocks[source, :length]

    def extend(self, row: int, num_computed: int, block_ids: Sequence[Sequence[int]]) -> None:
        """Add blocks to a row, group by group; take away what no token from `num_computed` on reads."""
        lengths = self.lengths[row]
        for group, new in enumerate(block_ids):
            if new:
                start = lengths[group]
                self.blocks[group][row, start : start + len(new)] = new
                lengths[group] = start + len(new)
            if self.groups[group].window is not None:
                first = self.groups[group].first_needed(num_computed, self.block_size)
                if first > self._given_back[row][group]:
                    self.blocks[group][row, self._given_back[row][group] : first] = self._spare
                    self._given_back[row][group] = first


@dataclass(frozen=True, slots=True)
class ImageTargets:
    """Where one image's rows go: row i to absolute position `positions[i]` (int64, ascending)."""

    index: int
    key: str
    positions: npt.NDArray[np.int64]


class SequenceRecord:
    """What the runner remembers of one request.

    Args:
        new: As the scheduler told of it.
        vocab_size: V.
        device: Where the logits are.
    """

    def __init__(self, new: NewRequest, vocab_size: int, device: torch.device) -> None:
        self.new = new
        self.request_id = new.request_id
        self.kept_rows: dict[int, ImageRows] = {}
        """Number of an image -> its rows, on the CPU, in place of its tensors."""
        prompt = new.prompt
        self.plan = new.plan
        self.row = NO_ROW
        self.sampling = SequenceState(
            new.sampling, new.seed, new.bad_words, prompt.token_ids, vocab_size, device, new.processors
        )
        self.num_prompt = len(prompt.token_ids)
        room = self.num_prompt + (new.sampling.max_tokens or 0)
        self.token_ids: npt.NDArray[np.int64] = np.zeros(room, dtype=np.int64)
        self.token_ids[: self.num_prompt] = prompt.token_ids
        self.length = self.num_prompt
        self.images = tuple(
            ImageTargets(index, image.key, np.asarray(image.range.embed_positions(), dtype=np.int64))
            for index, image in enumerate(prompt.images)
            if image.range.num_embeds
        )

    @property
    def prompt(self) -> ProcessedPrompt:
        """Its ids and images."""
        return self.new.prompt

    def keep_rows(self, index: int, rows: ImageRows) -> int:
        """Image `index` was encoded: keep its rows in place of its tensors, where they take less.

        If the request has to begin again and the rows were dropped meanwhile, these stand for encoding once more.

        Returns:
            Bytes of tensors that were let go.
        """
        images = self.prompt.images
        freed = images[index].nbytes()
        if not 0 < rows.nbytes() < freed:
            return 0
        self.kept_rows[index] = rows.to("cpu")
        left = (*images[:index], replace(images[index], tensors={}), *images[index + 1 :])
        self.new = replace(self.new, prompt=replace(self.prompt, images=left))
        return freed

    def num_report_rows(self, chunk: ScheduledChunk) -> int:
        """Leading tokens of a chunk whose logits are wanted for the report on the prompt tokens after them."""
        if self.new.sampling.prompt_logprobs is None or self.length > self.num_prompt:
            return 0
        return max(0, min(chunk.start + chunk.num_tokens, self.num_prompt - 1) - chunk.start)

    def append(self, token_id: int) -> None:
        """Add a generated token."""
        if self.length < len(self.token_ids):
            self.token_ids[self.length] = token_id
        self.length += 1

    def images_between(self, start: int, stop: int) -> list[ImageTargets]:
        """Images with at least one row at positions start..stop-1."""
        if start >= self.num_prompt:
            return []
        return [
            image
            for image in self.images
            if image.positions[0] < stop
            and image.positions[-1] >= start
            and np.searchsorted(image.positions, start) < np.searchsorted(image.positions, stop)
        ]


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the T packed tokens come from: those of chunk i are `offsets[i]` to `offsets[i + 1] - 1`.

    Attributes:
        query_lens, key_lens: Per chunk, its tokens, and those its last one looks at.
        offsets: [chunks + 1], int64.
        sequence: [T], int64: which chunk a token is of.
        absolute: [T], int64: its place in its own sequence.
    """

    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    offsets: npt.NDArray[np.int64]
    sequence: npt.NDArray[np.int64]
    absolute: npt.NDArray[np.int64]

    @classmethod
    def of(cls, chunks: Sequence[ScheduledChunk]) -> _Layout:
        query_lens = tuple(chunk.num_tokens for chunk in chunks)
        offsets = np.zeros(len(chunks) + 1, dtype=np.int64)
        np.cumsum(query_lens, out=offsets[1:])
        starts = np.fromiter((chunk.start for chunk in chunks), dtype=np.int64, count=len(chunks))
        sequence = np.repeat(np.arange(len(chunks)), query_lens)
        return cls(
            query_lens=query_lens,
            key_lens=tuple(chunk.start + chunk.num_tokens for chunk in chunks),
            offsets=offsets,
            sequence=sequence,
            absolute=np.arange(len(sequence)) + (starts - offsets[:-1])[sequence],
        )


def pack(
    chunks: Sequence[ScheduledChunk],
    records: Sequence[SequenceRecord],
    tables: BlockTables,
    images: Mapping[str, ImageRows],
    device: torch.device,
    *,
    with_sequences: bool,
) -> PackedBatch:
    """One forward's input for `chunks`, whose requests' `records` are in the same order."""
    layout = _Layout.of(chunks)
    attention, *more_attention = _attention(chunks, records, layout, tables, device)
    sequences = zip(chunks, records, strict=True) if with_sequences else ()
    return PackedBatch(
        token_ids=_to(_token_ids(chunks, records, layout), device),
        positions=_to(_positions(chunks, records, layout), device),
        placements=tuple(_placements(chunks, records, layout, images, device)),
        attention=attention,
        more_attention=tuple(more_attention),
        logit_indices=_to(_logit_indices(chunks, records, layout), device),
        sequences=tuple(SequenceInput(record.request_id, record.prompt, chunk.start) for chunk, record in sequences),
    )


def _to(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)


def _token_ids(
    chunks: Sequence[ScheduledChunk], records: Sequence[SequenceRecord], layout: _Layout
) -> npt.NDArray[np.int64]:
    token_ids = np.empty(len(layout.sequence), dtype=np.int64)
    for chunk, record, at in zip(chunks, records, layout.offsets.tolist()[:-1], strict=True):
        token_ids[at : at + chunk.num_tokens] = record.token_ids[chunk.start : chunk.start + chunk.num_tokens]
    return token_ids


def _attention(
    chunks: Sequence[ScheduledChunk],
    records: Sequence[SequenceRecord],
    layout: _Layout,
    tables: BlockTables,
    device: torch.device,
) -> list[AttentionMetadata]:
    """What attention needs to know, for each of the cache's groups: only blocks and slots differ."""
    rows = np.fromiter((record.row for record in records), dtype=np.int64, count=len(records))
    width = max(-(-length // tables.block_size) for length in layout.key_lens)
    block, within = layout.absolute // tables.block_size, layout.absolute % tables.block_size
    cu_seqlens_q = _to(layout.offsets.astype(np.int32), device)
    key_lens_tensor = _to(np.asarray(layout.key_lens, dtype=np.int32), device)
    spans = tuple(_spans(chunk, record) for chunk, record in zip(chunks, records, strict=True))
    groups = []
    for blocks in tables.blocks:
        block_tables = blocks[rows, :width]
        slots = block_tables[layout.sequence, block].astype(np.int64) * tables.block_size + within
        groups.append(
            AttentionMetadata(
                query_lens=layout.query_lens,
                key_lens=layout.key_lens,
                cu_seqlens_q=cu_seqlens_q,
                key_lens_tensor=key_lens_tensor,
                spans=spans,
                block_tables=_to(np.ascontiguousarray(block_tables), device),
                slot_mapping=_to(slots, device),
            )
        )
    return groups


def _logit_indices(
    chunks: Sequence[ScheduledChunk], records: Sequence[SequenceRecord], layout: _Layout
) -> npt.NDArray[np.int64]:
    """Packed indices, chunk by chunk: those to report on, then the one to sample from."""
    if all(record.new.sampling.prompt_logprobs is None for record in records):
        samples = np.fromiter((chunk.samples for chunk in chunks), dtype=bool, count=len(chunks))
        return layout.offsets[1:][samples] - 1
    wanted: list[int] = []
    for chunk, record, at in zip(chunks, records, layout.offsets.tolist()[:-1], strict=True):
        wanted += range(at, at + record.num_report_rows(chunk))
        if chunk.samples:
            wanted.append(at + chunk.num_tokens - 1)
    return np.asarray(wanted, dtype=np.int64)


def _positions(
    chunks: Sequence[ScheduledChunk], records: Sequence[SequenceRecord], layout: _Layout
) -> npt.NDArray[np.int64]:
    """Positions [P, T]: generated tokens by their request's delta, prompt tokens from its plan."""
    deltas = np.fromiter((record.plan.delta for record in records), dtype=np.int64, count=len(records))
    num_rows = records[0].plan.positions.shape[0]
    positions = np.repeat((layout.absolute + deltas[layout.sequence])[None], num_rows, axis=0)
    for chunk, record, at in zip(chunks, records, layout.offsets.tolist()[:-1], strict=True):
        stop = min(chunk.start + chunk.num_tokens, record.num_prompt)
        if chunk.start < stop:
            positions[:, at : at + stop - chunk.start] = record.plan.positions[:, chunk.start : stop]
    return positions


def _placements(
    chunks: Sequence[ScheduledChunk],
    records: Sequence[SequenceRecord],
    layout: _Layout,
    images: Mapping[str, ImageRows],
    device: torch.device,
) -> list[RowPlacement]:
    placements = []
    for chunk, record, at in zip(chunks, records, layout.offsets.tolist()[:-1], strict=True):
        stop = chunk.start + chunk.num_tokens
        for image in record.images_between(chunk.start, stop):
            first, last = np.searchsorted(image.positions, (chunk.start, stop))
            targets = torch.from_numpy(image.positions[first:last] - chunk.start + at)
            placements.append(RowPlacement(images[image.key], int(first), targets.to(device)))
    return placements


def _spans(chunk: ScheduledChunk, record: SequenceRecord) -> tuple[tuple[int, int], ...]:
    if chunk.start >= record.num_prompt:
        return ()
    stop = chunk.start + chunk.num_tokens
    return tuple(span for span in record.plan.spans if span[0] < stop and span[1] > chunk.start)
