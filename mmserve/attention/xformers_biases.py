"""From the metadata of a packed batch to the biases that xformers' kernels take.

    decode, whole past       PagedBlockDiagonalCausalWithOffsetPaddedKeysMask over the pages as they lie
    decode, window or chunk  PagedBlockDiagonalGappyKeysMask: a lone query sees one interval of its keys, all of it
    pieces of sequences      BlockDiagonalCausalFromBottomRightMask over gathered keys; with a window its local form
    spans, chunks            a dense bias per sequence: no bias class of xformers has holes on both sides

Everything here works on any device, so that each bias can be materialised and compared with the rule of `masks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mmserve.attention.interface import AttentionMetadata, AttentionSpec
from mmserve.attention.masks import sequence_mask, spans_in_view

__all__ = ["decode_bias", "dense_bias", "needs_dense_bias", "piece_bias", "piece_slots"]

ALIGNMENT = 8
"""Elements that the row of a dense bias must be a multiple of, in memory."""


def decode_bias(metadata: AttentionMetadata, sequences: Sequence[int], spec: AttentionSpec, page_size: int) -> Any:
    """The paged bias of `sequences`, each with one query."""
    from xformers.ops.fmha import attn_bias as biases

    tables = metadata.block_tables
    if len(sequences) != tables.shape[0]:
        tables = tables[list(sequences)]
    lens = [metadata.key_lens[i] for i in sequences]
    queries = [1] * len(lens)
    padding = tables.shape[1] * page_size
    if spec.window is None and spec.chunk is None:
        padded = biases.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
            q_seqlen=queries, kv_padding=padding, kv_seqlen=lens, device=tables.device
        )
        return padded.make_paged(
            block_tables=tables,
            page_size=page_size,
            paged_type=biases.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask,
        )
    firsts = [first_key(length - 1, spec) for length in lens]
    gappy = biases.BlockDiagonalGappyKeysMask.from_seqlens(
        q_seqlen=queries,
        kv_seqstarts=[*(i * padding + first for i, first in enumerate(firsts)), len(lens) * padding],
        kv_seqlen=[length - first for length, first in zip(lens, firsts, strict=True)],
        device=tables.device,
    )
    return gappy.make_paged(
        block_tables=tables,
        page_size=page_size,
        notional_padding=padding,
        paged_type=biases.PagedBlockDiagonalGappyKeysMask,
    )


def first_key(position: int, spec: AttentionSpec) -> int:
    """The first key that a lone query at `position` sees."""
    first = 0 if spec.window is None else max(0, position - spec.window + 1)
    return first if spec.chunk is None else max(first, position // spec.chunk * spec.chunk)


def piece_bias(metadata: AttentionMetadata, sequences: Sequence[int], spec: AttentionSpec, device: torch.device) -> Any:
    """The bias of `sequences`' queries over their keys, gathered end to end: [sum query_len, sum key_len]."""
    from xformers.ops.fmha import attn_bias as biases

    bias = biases.BlockDiagonalCausalFromBottomRightMask.from_seqlens(
        q_seqlen=[metadata.query_lens[i] for i in sequences],
        kv_seqlen=[metadata.key_lens[i] for i in sequences],
        device=device,
    )
    return bias if spec.window is None else bias.make_local_attention_from_bottomright(spec.window)


def piece_slots(metadata: AttentionMetadata, sequences: Sequence[int], block_size: int) -> torch.Tensor:
    """Where the keys of `sequences` lie in the cache, end to end: int64 [sum key_len]."""
    device = metadata.block_tables.device
    parts = []
    for i in sequences:
        position = torch.arange(metadata.key_lens[i], device=device)
        block = metadata.block_tables[i].long()[position // block_size]
        parts.append(block * block_size + position % block_size)
    return torch.cat(parts)


def needs_dense_bias(metadata: AttentionMetadata, sequence: int, spec: AttentionSpec) -> bool:
    """Whether a piece of this sequence sees what no bias class can say."""
    chunked = spec.chunk is not None and spec.chunk < metadata.key_lens[sequence]
    return chunked or bool(spans_in_view(metadata, sequence, spec))


def dense_bias(
    metadata: AttentionMetadata, sequence: int, spec: AttentionSpec, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """0 where a query sees a key, -inf elsewhere: [1, H, query_len, key_len], one plane for all heads."""
    mask = sequence_mask(metadata, sequence, spec, device)
    padded = -(-mask.shape[1] // ALIGNMENT) * ALIGNMENT
    bias = torch.zeros(mask.shape[0], padded, dtype=dtype, device=device)[:, : mask.shape[1]]
    bias.masked_fill_(~mask, float("-inf"))
    return bias.expand(1, spec.num_heads, -1, -1)
