"""Idefics2: the text of an image is built without being reported, and touching images share a boundary token.

alone       F IMG IMG F              split into tiles, with do_image_splitting: five times that, boundaries shared
touching    F IMG IMG F IMG IMG F    one boundary token between them
then text   F IMG IMG F " " text     a space, unless a blank or `<` follows
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from processors.chat import Segment

__all__ = ["replacement", "share_boundaries"]


def replacement(processor: Any, outputs: Mapping[str, Any]) -> str:
    """The text of one image, boundary tokens at both ends; one stretch of image tokens a tile."""
    boundary = str(processor.fake_image_token)
    tiles = int(outputs["pixel_values"].shape[1])
    return boundary + (str(processor.image_token) * int(processor.image_seq_len) + boundary) * tiles


def share_boundaries(processor: Any, segments: Sequence[Segment]) -> list[Segment]:
    """One boundary token between touching images; a space between an image and a word."""
    boundary = str(processor.fake_image_token)
    shared: list[Segment] = []
    for segment in segments:
        before = shared[-1].kind if shared else "text"
        text = segment.text
        if segment.kind == "image" and before == "image":
            text = text.removeprefix(boundary)
        elif segment.kind != "image" and before == "image" and not (text[:1].isspace() or text[:1] == "<"):
            shared.append(Segment("text", " "))
        shared.append(Segment(segment.kind, text))
    return shared
