"""Text that a processor puts around a prompt before it tokenises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from processors.chat import Segment

__all__ = ["begin_with_bos", "begin_with_system_prompt", "bos_behind_images", "end_with_separator"]


def begin_with_bos(processor: Any, segments: Sequence[Segment]) -> list[Segment]:
    """Emu3, Molmo2: a beginning-of-sequence token, which their tokenizers do not add; once."""
    bos = str(processor.tokenizer.bos_token or processor.tokenizer.eos_token)
    if segments and segments[0].kind == "text" and segments[0].text.startswith(bos):
        return list(segments)
    return [Segment("text", bos), *segments]


def end_with_separator(processor: Any, segments: Sequence[Segment]) -> list[Segment]:
    """Chameleon: a separator token ends the user's turn."""
    return [*segments, Segment("text", str(processor.tokenizer.sep_token))]


def begin_with_system_prompt(processor: Any, segments: Sequence[Segment]) -> list[Segment]:
    """Janus: a system prompt in front, if the processor is set to it."""
    if not processor.use_default_system_prompt:
        return list(segments)
    from transformers.models.janus.processing_janus import DEFAULT_SYSTEM_PROMPT

    return [Segment("text", DEFAULT_SYSTEM_PROMPT), *segments]


def bos_behind_images(processor: Any, segments: Sequence[Segment]) -> list[Segment]:
    """PaliGemma: a beginning-of-sequence token behind the last image, a newline at the end.

    The caller's own, in front of everything or behind the last image, is that token: there is one.
    """
    last = max((i for i, segment in enumerate(segments) if segment.kind == "image"), default=-1)
    bos = str(processor.tokenizer.bos_token)
    before, behind = (_without_first(part, bos) for part in (segments[: last + 1], segments[last + 1 :]))
    return [*before, Segment("text", bos), *behind, Segment("text", "\n")]


def _without_first(segments: Sequence[Segment], bos: str) -> list[Segment]:
    """The segments without the beginning-of-sequence token that they begin with, if they do."""
    if not segments or segments[0].kind != "text" or not segments[0].text.startswith(bos):
        return list(segments)
    rest = segments[0].text.removeprefix(bos)
    return [*([Segment("text", rest)] if rest else []), *segments[1:]]
