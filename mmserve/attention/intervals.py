"""The keys that each query sees, as one interval: what the rule of `masks` comes to.

Every set that the rule joins holds the query's own position and has no hole in it: the causal past, a window
or a chunk of it, a both-way span around the query. So their union has no hole either, and two integers a
query say all that a dense mask says.
"""

from __future__ import annotations

import torch

from mmserve.attention.interface import AttentionMetadata, AttentionSpec
from mmserve.attention.masks import spans_in_view

__all__ = ["Intervals", "visible_intervals"]

Intervals = tuple[torch.Tensor, torch.Tensor]
"""lo and hi, int32 [T]: query t sees keys lo[t] .. hi[t] - 1 of its sequence."""


def visible_intervals(metadata: AttentionMetadata, spec: AttentionSpec) -> Intervals:
    """The intervals of this batch; layers of the same window and chunk share them within a step."""
    memo = ("intervals", spec.window, spec.chunk, spec.window_cuts_spans, spec.both_ways)
    if memo not in metadata.scratch:
        metadata.scratch[memo] = _make(metadata, spec)
    made: Intervals = metadata.scratch[memo]
    return made


def _make(metadata: AttentionMetadata, spec: AttentionSpec) -> Intervals:
    position = query_positions(metadata)
    lo, hi = torch.zeros_like(position), position + 1
    if spec.window is not None:
        lo = (position - (spec.window - 1)).clamp_(min=0)
    if spec.chunk is not None:
        lo = torch.maximum(lo, position - position % spec.chunk)
    start = 0
    for sequence, length in enumerate(metadata.query_lens):
        rows = slice(start, start + length)
        start += length
        for first, stop in spans_in_view(metadata, sequence, spec):
            inside = (position[rows] >= first) & (position[rows] < stop)
            begin = torch.full_like(position[rows], first)
            if spec.window is not None and spec.window_cuts_spans:
                begin = torch.maximum(begin, position[rows] - (spec.window - 1))
            lo[rows] = torch.where(inside, torch.minimum(lo[rows], begin), lo[rows])
            hi[rows] = torch.where(inside, hi[rows].clamp(min=stop), hi[rows])
    return lo, hi


def query_positions(metadata: AttentionMetadata) -> torch.Tensor:
    """The absolute position of each query: int32 [T]."""
    if len(metadata.query_lens) == metadata.slot_mapping.shape[0]:  # one query a sequence
        return metadata.key_lens_tensor - 1
    lens = torch.tensor(metadata.query_lens, device=metadata.key_lens_tensor.device)
    first = (metadata.key_lens_tensor - lens - metadata.cu_seqlens_q[:-1]).repeat_interleave(lens)
    return (first + torch.arange(first.shape[0], device=first.device)).to(torch.int32)
