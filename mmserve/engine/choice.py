"""One random choice a row, among the tokens that top_k, top_p and min_p leave.

The filters are transformers' (logits_process.py). They are stated twice: over the whole vocabulary, which needs
it sorted, and over the likeliest `CANDIDATES` of it, which is much cheaper and gives the same whenever the filters
leave nothing beyond these. Which way a row goes depends on that row alone.
"""

from __future__ import annotations

import torch

__all__ = ["CANDIDATES", "NEG_INF", "choose", "inverse_cdf", "min_p_filter", "top_k_filter", "top_p_filter"]

NEG_INF = float("-inf")
CANDIDATES = 512
"""Likeliest tokens that are looked at first; a smaller vocabulary is looked at whole."""


def choose(
    scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor, numbers: torch.Tensor
) -> torch.Tensor:
    """Choose an id a row.

    Args:
        scores: [R, V], temperature applied; -inf for what must not be chosen.
        top_k: int64 [R, 1], V for no limit. top_p: [R, 1], 1 for no limit. min_p: [R, 1], 0 for no limit.
        numbers: float64 [R] of [0, 1): where in the running sum of the probabilities the choice falls.

    Returns:
        int64 [R].
    """
    if scores.shape[-1] <= 2 * CANDIDATES:
        return _choose_from_all(scores, top_k, top_p, min_p, numbers)
    values, ids = scores.topk(CANDIDATES, dim=-1)
    total = torch.logsumexp(scores, dim=-1, keepdim=True)
    enough = _leaves_only_candidates(values, total, top_k, top_p, min_p, unlimited=top_k >= scores.shape[-1])
    chosen = torch.empty(len(scores), dtype=torch.int64, device=scores.device)
    if bool(enough.any()):
        few = (values[enough], ids[enough], total[enough], top_k[enough], top_p[enough], min_p[enough])
        chosen[enough] = _choose_from_candidates(*few, numbers[enough])
    if not bool(enough.all()):
        rest = ~enough
        chosen[rest] = _choose_from_all(scores[rest], top_k[rest], top_p[rest], min_p[rest], numbers[rest])
    return chosen


def _leaves_only_candidates(
    values: torch.Tensor,
    total: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    *,
    unlimited: torch.Tensor,
) -> torch.Tensor:
    """Whether the filters remove all but the candidates `values` [R, C], likeliest first; bool [R]."""
    last = values[:, -1:]
    # A token that ties with the k-th stays, so the k-th must be likelier than the last candidate.
    by_top_k = (top_k < values.shape[-1]) & (values.gather(-1, top_k.clamp(max=values.shape[-1]) - 1) > last)
    by_top_p = (values - total).exp().sum(dim=-1, keepdim=True) > top_p
    by_min_p = last < values[:, :1] + min_p.log()
    return (by_top_k | (unlimited & (by_top_p | by_min_p))).squeeze(-1)


def _choose_from_candidates(
    values: torch.Tensor,
    ids: torch.Tensor,
    total: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    numbers: torch.Tensor,
) -> torch.Tensor:
    """As `_choose_from_all`, from candidates that hold all the filters leave, likeliest first."""
    limited = top_k < values.shape[-1]
    threshold = values.gather(-1, top_k.clamp(max=values.shape[-1]) - 1)
    values = values.masked_fill((values < threshold) & limited, NEG_INF)
    # top_p counts the probability that top_k has left.
    total = torch.where(limited, torch.logsumexp(values, dim=-1, keepdim=True), total)
    probabilities = (values - total).exp()
    before = probabilities.cumsum(dim=-1) - probabilities
    keep = (before < top_p) & (values >= values[:, :1] + min_p.log())
    keep[:, 0] = True
    order = ids.argsort(dim=-1)
    kept = values.masked_fill(~keep, NEG_INF).gather(-1, order)
    place = inverse_cdf(kept, numbers).unsqueeze(-1)
    return ids.gather(-1, order).gather(-1, place).squeeze(-1)


def _choose_from_all(
    scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor, numbers: torch.Tensor
) -> torch.Tensor:
    scores = top_k_filter(scores, top_k)
    scores = top_p_filter(scores, top_p)
    scores = min_p_filter(scores, min_p)
    return inverse_cdf(scores, numbers)


def top_k_filter(scores: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Remove what is less likely than the k-th likeliest (transformers' TopKLogitsWarper; ties stay).

    Args:
        scores: [R, V]. top_k: int64 [R, 1], V for no limit.
    """
    size = scores.shape[-1]
    largest = int(top_k.clamp(max=size).where(top_k < size, 0).max())
    if largest == 0:
        return scores
    values = scores.topk(largest, dim=-1).values
    threshold = values.gather(-1, top_k.clamp(max=largest) - 1)
    return scores.masked_fill((scores < threshold) & (top_k < size), NEG_INF)


def top_p_filter(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep the likeliest that hold `top_p` [R, 1] of the probability (transformers' TopPLogitsWarper)."""
    if bool((top_p >= 1.0).all()):
        return scores
    ascending, order = scores.sort(dim=-1)
    remove = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1.0 - top_p
    remove &= top_p < 1.0
    remove[:, -1] = False
    return scores.masked_fill(remove.scatter(1, order, remove), NEG_INF)


def min_p_filter(scores: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Remove what is less likely than `min_p` [R, 1] times the likeliest (transformers' MinPLogitsWarper)."""
    if not bool(min_p.any()):
        return scores
    probabilities = scores.softmax(dim=-1)
    threshold = min_p * probabilities.amax(dim=-1, keepdim=True)
    return scores.masked_fill(probabilities < threshold, NEG_INF)


def inverse_cdf(scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The id [R] in whose part of the running sum of softmax(scores [R, V]) each number [R] of [0, 1) falls."""
    sums = scores.softmax(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    # The sum's last entry is 1 but for rounding; a target at or beyond it would point behind the last token.
    total = sums[:, -1]
    target = torch.minimum(numbers * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(sums, target.unsqueeze(-1), right=True).squeeze(-1)
