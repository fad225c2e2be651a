"""Both-way spans: ranges of tokens that see each other in both directions, and so are computed in one step."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["before_span", "span_stop"]


def before_span(spans: Sequence[tuple[int, int]], stop: int) -> int:
    """`stop`, or the start of the span that a cut at `stop` would go through."""
    for first, last in spans:
        if first < stop < last:
            return first
    return stop


def span_stop(spans: Sequence[tuple[int, int]], start: int) -> int:
    """Where the span that `start` lies in ends; `start` itself outside of spans."""
    for first, last in spans:
        if first <= start < last:
            return last
    return start
