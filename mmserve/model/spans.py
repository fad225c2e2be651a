"""Which parts of a prompt attend both ways: the rules that families follow.

Which one a model follows is found by its masks (`mmserve.model.probe`), not by its name.
"""

from __future__ import annotations

from collections.abc import Callable

from processors.types import ProcessedPrompt

__all__ = ["SpanRule", "each_image", "no_spans", "whole_prompt"]

SpanRule = Callable[[ProcessedPrompt], tuple[tuple[int, int], ...]]
"""From a prompt to its absolute half-open ranges that attend both ways."""


def no_spans(prompt: ProcessedPrompt) -> tuple[tuple[int, int], ...]:
    """Causal everywhere."""
    return ()


def each_image(prompt: ProcessedPrompt) -> tuple[tuple[int, int], ...]:
    """Each run of feature rows by itself: two images see each other causally (Gemma 3)."""
    spans: list[tuple[int, int]] = []
    for image in prompt.images:
        start = previous = None
        for position in image.range.embed_positions():
            if start is None or previous is None:
                start = position
            elif position != previous + 1:
                spans.append((start, previous + 1))
                start = position
            previous = position
        if start is not None and previous is not None:
            spans.append((start, previous + 1))
    return tuple(spans)


def whole_prompt(prompt: ProcessedPrompt) -> tuple[tuple[int, int], ...]:
    """The prompt is a prefix that sees all of itself (PaliGemma); what is generated is causal."""
    return ((0, len(prompt.token_ids)),)
