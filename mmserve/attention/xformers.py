"""The CUDA backend: xformers' memory-efficient attention over the paged cache.

Sequences with one query are attended in place, by the split-K kernel that reads pages; longer pieces have
their keys gathered and go through a block-diagonal bias, or, where they need a mask with spans or chunks,
one sequence at a time through a dense bias.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from mmserve.attention.interface import AttentionMetadata, AttentionSpec, LayerCache
from mmserve.attention.xformers_biases import decode_bias, dense_bias, needs_dense_bias, piece_bias, piece_slots

__all__ = ["XFormersBackend", "decode_operands"]

PAGE_MULTIPLE = 64
MAX_HEAD_SIZE = 256


class XFormersBackend:
    """float16 and bfloat16 on CUDA, pages of a multiple of 64 tokens."""

    name = "xformers"

    def declines(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device, block_size: int) -> str | None:
        """None if xformers can serve the layer, else why not."""
        if device.type != "cuda":
            return f"it runs on CUDA, not on {device.type}"
        if importlib.util.find_spec("xformers") is None:
            return "xformers is not installed"
        if dtype not in (torch.float16, torch.bfloat16):
            return f"it computes in float16 and bfloat16, not in {str(dtype).removeprefix('torch.')}"
        if torch.cuda.get_device_capability(device) < (8, 0):
            return "its paged kernel needs compute capability 8.0"
        return _declines_shape(spec, block_size)

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
        cache.key.flatten(0, 1).index_copy_(0, metadata.slot_mapping, key)
        cache.value.flatten(0, 1).index_copy_(0, metadata.slot_mapping, value)
        singles, pieces, dense = _split(metadata, spec)
        if not pieces and not dense:
            return self._decode(query, cache, spec, metadata, singles)
        out = query.new_empty(query.shape[0], spec.num_heads, spec.value_size)
        for sequences, attend in ((singles, self._decode), (pieces, self._pieces)):
            if sequences:
                rows = _rows(metadata, sequences)
                out[rows] = attend(query[rows], cache, spec, metadata, sequences)
        for sequence in dense:
            rows = _rows(metadata, [sequence])
            out[rows] = self._dense(query[rows], cache, spec, metadata, sequence)
        return out

    def _decode(
        self,
        query: torch.Tensor,
        cache: LayerCache,
        spec: AttentionSpec,
        metadata: AttentionMetadata,
        sequences: Sequence[int],
    ) -> torch.Tensor:
        """query [s, H, D], one a sequence -> [s, H, Dv]."""
        from xformers.ops import fmha

        q, k, v, bias = decode_operands(query, cache, spec, metadata, sequences)
        out = fmha.memory_efficient_attention_forward(
            q, k, v, attn_bias=bias, scale=spec.scale, op=fmha.triton_splitk.FwOp
        )
        return out.reshape(query.shape[0], spec.num_heads, spec.value_size)

    def _pieces(
        self,
        query: torch.Tensor,
        cache: LayerCache,
        spec: AttentionSpec,
        metadata: AttentionMetadata,
        sequences: Sequence[int],
    ) -> torch.Tensor:
        """query [q, H, D] of all `sequences` -> [q, H, Dv]."""
        from xformers.ops import fmha

        step = (spec.window, tuple(sequences))
        slots = _once(metadata, ("slots", *step), lambda: piece_slots(metadata, sequences, cache.block_size))
        bias = _once(metadata, ("pieces", *step), lambda: piece_bias(metadata, sequences, spec, query.device))
        k, v = _grouped(cache.key, spec)[:, slots], _grouped(cache.value, spec)[:, slots]
        out = fmha.memory_efficient_attention_forward(
            _by_group(query, spec), _over_heads(k, spec), _over_heads(v, spec), attn_bias=bias, scale=spec.scale
        )
        return out.reshape(query.shape[0], spec.num_heads, spec.value_size)

    def _dense(
        self,
        query: torch.Tensor,
        cache: LayerCache,
        spec: AttentionSpec,
        metadata: AttentionMetadata,
        sequence: int,
    ) -> torch.Tensor:
        """query [q, H, D] of one sequence -> [q, H, Dv]."""
        from xformers.ops import fmha

        step = (spec.window, spec.chunk, spec.window_cuts_spans, spec.both_ways, sequence)
        bias = _once(
            metadata, ("dense", *step), lambda: dense_bias(metadata, sequence, spec, query.dtype, query.device)
        )
        slots = piece_slots(metadata, [sequence], cache.block_size)
        group = spec.num_heads // spec.num_kv_heads
        k = cache.key.flatten(0, 1)[slots].repeat_interleave(group, 1)
        v = cache.value.flatten(0, 1)[slots].repeat_interleave(group, 1)
        out: torch.Tensor = fmha.memory_efficient_attention_forward(
            query[None], k[None], v[None], attn_bias=bias, scale=spec.scale, op=fmha.cutlass.FwOp
        )
        return out[0]


def _declines_shape(spec: AttentionSpec, block_size: int) -> str | None:
    """What depends on the layer and the cache alone."""
    if block_size % PAGE_MULTIPLE:
        return f"its pages are multiples of {PAGE_MULTIPLE} tokens, and block_size is {block_size}"
    if spec.soft_cap is not None:
        return "it has no soft cap on scores"
    if spec.sinks is not None:
        return "it has no attention sinks"
    if spec.head_size != spec.value_size:
        return f"keys of {spec.head_size} and values of {spec.value_size} differ in size"
    if spec.head_size % 8 or spec.head_size > MAX_HEAD_SIZE:
        return f"head size {spec.head_size} is no multiple of 8 up to {MAX_HEAD_SIZE}"
    return None


def decode_operands(
    query: torch.Tensor,
    cache: LayerCache,
    spec: AttentionSpec,
    metadata: AttentionMetadata,
    sequences: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any]:
    """query, key, value [1, tokens, K, H / K, D] and the paged bias, for the split-K kernel.

    The cache is viewed, never copied: its N blocks end to end are the tokens, and the heads of a group share
    a key head by a stride of 0.
    """
    step = ("decode", spec.window, spec.chunk, tuple(sequences))
    bias = _once(metadata, step, lambda: decode_bias(metadata, sequences, spec, cache.block_size))
    key, value = _grouped(cache.key, spec), _grouped(cache.value, spec)
    return _by_group(query, spec), _over_heads(key, spec), _over_heads(value, spec), bias


def _split(metadata: AttentionMetadata, spec: AttentionSpec) -> tuple[list[int], list[int], list[int]]:
    """The sequences with one query, those whose pieces have a bias class, and those that need a dense bias."""
    singles: list[int] = []
    pieces: list[int] = []
    dense: list[int] = []
    for sequence, length in enumerate(metadata.query_lens):
        if length == 1:
            singles.append(sequence)
        elif length > 1:
            (dense if needs_dense_bias(metadata, sequence, spec) else pieces).append(sequence)
    return singles, pieces, dense


def _rows(metadata: AttentionMetadata, sequences: Sequence[int]) -> torch.Tensor:
    """Packed indices of the queries of `sequences`, in order."""
    parts = []
    starts = [0]
    for length in metadata.query_lens:
        starts.append(starts[-1] + length)
    for i in sequences:
        parts.append(torch.arange(starts[i], starts[i + 1]))
    return torch.cat(parts).to(metadata.block_tables.device)


def _once(metadata: AttentionMetadata, name: Hashable, make: Callable[[], Any]) -> Any:
    """Made by the first layer of a step, kept for the others."""
    memo = ("xformers", name)
    if memo not in metadata.scratch:
        metadata.scratch[memo] = make()
    return metadata.scratch[memo]


def _by_group(query: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """[q, H, D] -> [1, q, K, H / K, D]."""
    return query.reshape(1, query.shape[0], spec.num_kv_heads, -1, spec.head_size)


def _grouped(cache: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """[N, B, K, D] -> [1, N * B, K, 1, D], a view."""
    return cache.flatten(0, 1)[None, :, :, None]


def _over_heads(keys: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """[1, l, K, 1, D] -> [1, l, K, H / K, D], a view."""
    return keys.expand(-1, -1, -1, spec.num_heads // spec.num_kv_heads, -1)
