"""Images that are numbered in the prompt."""

from __future__ import annotations

from typing import Any

__all__ = ["renumber"]


def renumber(processor: Any, text: str, index: int) -> str:
    """MiniCPM-V: an image's text begins with its index in the prompt between two tokens, if the processor is set to it.

    `text` is that of an image alone, whose index is 0.
    """
    alone = f"{processor.image_id_start_token}0{processor.image_id_end_token}"
    if not text.startswith(alone):
        return text
    return f"{processor.image_id_start_token}{index}{processor.image_id_end_token}{text[len(alone) :]}"
