"""Attention over a packed batch in float64, written for reading: loops, no cache, no masks of ours."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mmserve.attention.interface import AttentionMetadata, AttentionSpec, LayerCache

Spans = tuple[tuple[int, int], ...]


def sees(q: int, k: int, spec: AttentionSpec, spans: Spans) -> bool:
    near = spec.window is None or q - k < spec.window
    for start, stop in spans:
        if start <= q < stop and start <= k < stop and (near or not spec.window_cuts_spans):
            return True
    return k <= q and near and (spec.chunk is None or k // spec.chunk == q // spec.chunk)


@dataclass(frozen=True)
class Case:
    """A packed batch over a cache that holds each sequence's earlier keys, and the right answer."""

    spec: AttentionSpec
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    cache: LayerCache
    metadata: AttentionMetadata
    expected: torch.Tensor


def make_case(
    spec: AttentionSpec,
    lengths: Sequence[tuple[int, int]],
    *,
    spans: Sequence[Spans] | None = None,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """`lengths`: (tokens already in the cache, tokens of this batch) of each sequence."""
    generator = torch.Generator().manual_seed(seed)
    spans = spans or [()] * len(lengths)
    rng = random.Random(seed)
    blocks_of = [-(-(past + new) // block_size) for past, new in lengths]
    free = list(range(sum(blocks_of) + 2))
    rng.shuffle(free)
    shape = (len(free), block_size, spec.num_kv_heads)
    # What nobody wrote must not be read: NaN would show.
    cache = LayerCache(
        torch.randn(*shape, spec.head_size, generator=generator).to(dtype),
        torch.randn(*shape, spec.value_size, generator=generator).to(dtype),
    )
    tables = torch.zeros(len(lengths), max(blocks_of), dtype=torch.int32)
    queries, keys, values, slots, expected = [], [], [], [], []
    for i, (past, new) in enumerate(lengths):
        total = past + new
        table = [free.pop() for _ in range(blocks_of[i])]
        tables[i, : len(table)] = torch.tensor(table)
        slot = [table[p // block_size] * block_size + p % block_size for p in range(total)]
        q = torch.randn(new, spec.num_heads, spec.head_size, generator=generator).to(dtype)
        k = torch.randn(total, spec.num_kv_heads, spec.head_size, generator=generator).to(dtype)
        v = torch.randn(total, spec.num_kv_heads, spec.value_size, generator=generator).to(dtype)
        cache.key.flatten(0, 1)[slot[:past]] = k[:past]
        cache.value.flatten(0, 1)[slot[:past]] = v[:past]
        queries.append(q)
        keys.append(k[past:])
        values.append(v[past:])
        slots += slot[past:]
        expected.append(_dense(q, k, v, past, spec, spans[i]))
    lens = [new for _, new in lengths]
    ends = [past + new for past, new in lengths]
    metadata = AttentionMetadata(
        query_lens=tuple(lens),
        key_lens=tuple(ends),
        cu_seqlens_q=torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32),
        key_lens_tensor=torch.tensor(ends, dtype=torch.int32),
        block_tables=tables,
        slot_mapping=torch.tensor(slots),
        spans=tuple(spans),
    )
    return Case(spec, torch.cat(queries), torch.cat(keys), torch.cat(values), cache, metadata, torch.cat(expected))


def _dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, past: int, spec: AttentionSpec, spans: Spans
) -> torch.Tensor:
    q, k, v = q.double(), k.double(), v.double()
    out = torch.zeros(q.shape[0], spec.num_heads, spec.value_size, dtype=torch.float64)
    group = spec.num_heads // spec.num_kv_heads
    for i in range(q.shape[0]):
        seen = [j for j in range(k.shape[0]) if sees(past + i, j, spec, spans)]
        for head in range(spec.num_heads):
            scores = k[seen, head // group] @ q[i, head] * spec.scale
            if spec.soft_cap is not None:
                scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
            out[i, head] = scores.softmax(0) @ v[seen, head // group]
    return out


def spec_of(heads: int, kv_heads: int, size: int, **more: object) -> AttentionSpec:
    values = {"value_size": size, "scale": 1 / math.sqrt(size), **more}
    return AttentionSpec(layer=0, num_heads=heads, num_kv_heads=kv_heads, head_size=size, **values)  # type: ignore[arg-type]
