"""The torch reference: every rule of the protocol, on any device, in plain torch.

One token of each of many sequences (decode) is attended in one call over padded pages; a longer piece
of a sequence (prefill, a chunk) is attended by itself. Softmax is computed in float32 or wider.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from mmserve.attention.interface import AttentionMetadata, AttentionSpec, LayerCache
from mmserve.attention.masks import sequence_mask, spans_in_view, visible

__all__ = ["ReferenceBackend"]


class ReferenceBackend:
    """Attention through `scaled_dot_product_attention`, or in full where that can not express the layer."""

    name = "reference"

    def declines(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device, block_size: int) -> str | None:
        """Serves everything."""
        return None

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerCache,
        spec: AttentionSpec,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """As the protocol says: query [T, H, D], key [T, K, D], value [T, K, Dv] -> [T, H, Dv]."""
        cache.key.flatten(0, 1).index_copy_(0, metadata.slot_mapping, key.to(cache.key.dtype))
        cache.value.flatten(0, 1).index_copy_(0, metadata.slot_mapping, value.to(cache.value.dtype))
        view = _single_query_view(metadata, spec, cache.block_size)
        if view is not None and len(view.sequences) == len(metadata.query_lens):
            return _attend_singles(query, cache, spec, view)
        out = query.new_empty(query.shape[0], spec.num_heads, spec.value_size)
        if view is not None:
            out[view.rows] = _attend_singles(query[view.rows], cache, spec, view)
        start = 0
        for sequence, length in enumerate(metadata.query_lens):
            if length > 1:
                rows = slice(start, start + length)
                out[rows] = _attend_piece(query[rows], cache, spec, metadata, sequence)
            start += length
        return out


@dataclass(frozen=True, slots=True)
class _SingleQueryView:
    """Sequences with one query in this batch, over their pages padded to n blocks.

    Attributes:
        sequences: Their indices, s of them. rows: int64 [s], their query's packed index.
        tables: int64 [s, n]. mask: bool [s, 1, 1, n * B].
    """

    sequences: tuple[int, ...]
    rows: torch.Tensor
    tables: torch.Tensor
    mask: torch.Tensor


def _single_query_view(metadata: AttentionMetadata, spec: AttentionSpec, block_size: int) -> _SingleQueryView | None:
    """The view that all layers of this step with the same window and chunk share; None if there is none.

    Spans need no thought here: inside one a lone query would have been cut from the rest of it.
    """
    memo = ("reference", spec.window, spec.chunk, block_size)
    if memo not in metadata.scratch:
        metadata.scratch[memo] = _make_single_query_view(metadata, spec, block_size)
    view: _SingleQueryView | None = metadata.scratch[memo]
    return view


def _make_single_query_view(
    metadata: AttentionMetadata, spec: AttentionSpec, block_size: int
) -> _SingleQueryView | None:
    sequences = tuple(i for i, length in enumerate(metadata.query_lens) if length == 1)
    if not sequences:
        return None
    device = metadata.block_tables.device
    index = torch.tensor(sequences, device=device)
    num_blocks = -(-max(metadata.key_lens[i] for i in sequences) // block_size)
    positions = torch.arange(num_blocks * block_size, device=device)
    last = metadata.key_lens_tensor[index].long() - 1
    return _SingleQueryView(
        sequences=sequences,
        rows=metadata.cu_seqlens_q[index].long(),
        tables=metadata.block_tables[index, :num_blocks].long(),
        mask=visible(last[:, None], positions[None], spec)[:, None],
    )


def _attend_singles(
    query: torch.Tensor, cache: LayerCache, spec: AttentionSpec, view: _SingleQueryView
) -> torch.Tensor:
    """query [s, H, D] -> [s, H, Dv]. The heads of a group stand as the rows of their key head."""
    count, kv_heads = query.shape[0], spec.num_kv_heads
    key = cache.key[view.tables].flatten(1, 2).transpose(1, 2)
    value = cache.value[view.tables].flatten(1, 2).transpose(1, 2)
    grouped = query.reshape(count, kv_heads, spec.num_heads // kv_heads, spec.head_size)
    return _attend(grouped, key, value, view.mask, spec).reshape(count, spec.num_heads, spec.value_size)


def _attend_piece(
    query: torch.Tensor, cache: LayerCache, spec: AttentionSpec, metadata: AttentionMetadata, sequence: int
) -> torch.Tensor:
    """query [q, H, D] of one sequence over all of its keys -> [q, H, Dv]."""
    length, key_len = query.shape[0], metadata.key_lens[sequence]
    blocks = metadata.block_tables[sequence, : -(-key_len // cache.block_size)].long()
    group = spec.num_heads // spec.num_kv_heads
    key = cache.key[blocks].flatten(0, 1)[:key_len].transpose(0, 1).repeat_interleave(group, 0)
    value = cache.value[blocks].flatten(0, 1)[:key_len].transpose(0, 1).repeat_interleave(group, 0)
    mask = None
    if not _is_plain_causal(spec, metadata, sequence):
        memo = ("reference", spec.window, spec.chunk, spec.window_cuts_spans, spec.both_ways, sequence)
        if memo not in metadata.scratch:
            metadata.scratch[memo] = sequence_mask(metadata, sequence, spec, query.device)
        mask = metadata.scratch[memo][None]
    out = _attend(query.transpose(0, 1)[None], key[None], value[None], mask, spec)
    return out[0].transpose(0, 1).reshape(length, spec.num_heads, spec.value_size)


def _is_plain_causal(spec: AttentionSpec, metadata: AttentionMetadata, sequence: int) -> bool:
    """Whether a lower triangle from the first key says it all, for which kernels need no mask."""
    key_len = metadata.key_lens[sequence]
    return (
        metadata.query_lens[sequence] == key_len
        and (spec.window is None or spec.window >= key_len)
        and (spec.chunk is None or spec.chunk >= key_len)
        and spec.soft_cap is None
        and spec.sinks is None
        and not spans_in_view(metadata, sequence, spec)
    )


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, spec: AttentionSpec
) -> torch.Tensor:
    """query [b, h, q, D], key [b, h, L, D], value [b, h, L, Dv], mask bool [b, 1, q, L] or None: causal.

    h times the rows of q that share a token is H: what stands where decides how a sink is laid out.
    """
    key, value = key.to(query.dtype), value.to(query.dtype)
    if spec.soft_cap is None and spec.sinks is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=spec.scale
        )
    assert mask is not None  # _is_plain_causal is False where there is a cap or a sink
    scores = torch.matmul(query, key.transpose(-1, -2)).float() * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if spec.sinks is not None:
        # [H] over h heads: a head's own column, or, where a group stands as rows, one value a row.
        sink = spec.sinks.float().view(query.shape[1], -1, 1).expand(query.shape[1], query.shape[2], 1)
        scores = torch.cat([scores, sink.expand(query.shape[0], -1, -1, -1)], dim=-1)
        weights = scores.softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return torch.matmul(weights.to(value.dtype), value)
