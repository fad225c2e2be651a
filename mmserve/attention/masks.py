"""Which key a query sees: the one rule that every backend computes or builds a bias for.

A query at absolute position q sees a key at position k when

    k <= q                                 causal
    and q - k < window                     where the layer slides (the query itself counts)
    and k // chunk == q // chunk           where attention is chunked
    or  some span holds both q and k       both ways inside an image or a prefix, where the layer has spans
        and q - k < window                 ... where the window cuts spans too

transformers composes the last two lines in both ways: `or_masks(sliding_window_causal, blockwise)` in
PaliGemma 2, `and_masks(sliding_window, or_masks(causal, blockwise))` in Gemma 3.

With window 3 and a span over positions 2..5, rows q, columns k::

        0 1 2 3 4 5 6        window_cuts_spans: 5 no longer sees 2
    0   x
    1   x x
    2   x x x x x x          2..5 see all of 2..5
    3     x x x x x
    4       x x x x
    5       x x x x
    6           x x x
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mmserve.attention.interface import AttentionMetadata, AttentionSpec

__all__ = ["sequence_mask", "spans_in_view", "visible"]


def visible(
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    spec: AttentionSpec,
    spans: Sequence[tuple[int, int]] = (),
) -> torch.Tensor:
    """Bool mask, True where the query sees the key.

    Args:
        query_positions: int64 [..., Q]. key_positions: int64 [..., L]; leading dimensions broadcast.
        spec: The layer's window, chunk and how the window meets spans.
        spans: Absolute half-open ranges that attend both ways.

    Returns:
        bool [..., Q, L].
    """
    q = query_positions.unsqueeze(-1)
    k = key_positions.unsqueeze(-2)
    mask = k <= q
    near = None if spec.window is None else q - k < spec.window
    if near is not None:
        mask = mask & near
    if spec.chunk is not None:
        mask = mask & (k // spec.chunk == q // spec.chunk)
    for start, stop in spans if spec.both_ways else ():
        inside = (q >= start) & (q < stop) & (k >= start) & (k < stop)
        mask = mask | (inside & near if near is not None and spec.window_cuts_spans else inside)
    return mask


def spans_in_view(metadata: AttentionMetadata, sequence: int, spec: AttentionSpec) -> tuple[tuple[int, int], ...]:
    """The both-way spans of one sequence that hold a query of this batch and more than one token, for this layer."""
    if not spec.both_ways:
        return ()
    key_len = metadata.key_lens[sequence]
    first = key_len - metadata.query_lens[sequence]
    return tuple(
        (start, stop)
        for start, stop in metadata.spans[sequence]
        if stop > first and start < key_len and stop - start > 1
    )


def sequence_mask(
    metadata: AttentionMetadata, sequence: int, spec: AttentionSpec, device: torch.device
) -> torch.Tensor:
    """The mask of one sequence's queries over all of its keys: bool [query_len, key_len]."""
    key_len = metadata.key_lens[sequence]
    keys = torch.arange(key_len, device=device)
    queries = keys[key_len - metadata.query_lens[sequence] :]
    return visible(queries, keys, spec, spans_in_view(metadata, sequence, spec))
