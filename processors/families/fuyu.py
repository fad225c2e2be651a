"""Fuyu: one image, in front of everything. Its processor writes the image token itself and tokenises in two halves.

    P P P N P P P N <s>   ▁What is it ?   <0x04>         P a patch, N the end of a row of patches

The image's half is tokenised without the space that the tokenizer puts in front of a text, the text's half with it, and
the beginning-of-sequence token stands between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from processors.chat import Segment
from processors.errors import PromptError

__all__ = ["image_first", "without_bos"]

_BOS = "<s>"
_ANSWER = "<0x04>"
_PLACES = ("<box>", "</box>", "<point>", "</point>", "<0x00>", "<0x01>", "<0x02>", "<0x03>")
"""What the processor replaces by coordinates in the resized picture."""


def without_bos(processor: Any, outputs: Mapping[str, Any]) -> str:
    """An image's text: rows of patches. The reported one ends with the prompt's beginning-of-sequence token."""
    return str(outputs["text_replacement_offsets"][0][0]["replacement"]).removesuffix(_BOS)


def image_first(processor: Any, segments: Sequence[Segment]) -> list[Segment]:
    """Image, beginning of sequence, text, beginning of the answer; a prompt without an image stays as it is.

    Raises:
        PromptError: The image is not in front, or the text tells places in the picture by their tags.
    """
    if all(segment.kind != "image" for segment in segments):
        return list(segments)
    written = segments[0].kind == "text" and segments[0].text == _BOS
    image, *rest = segments[1:] if written else segments
    if image.kind != "image":
        raise PromptError("this model takes its image in front of the prompt: put no text before the image")
    for segment in rest:
        found = [tag for tag in _PLACES if segment.kind == "text" and tag in segment.text]
        if found:
            raise PromptError(
                f"places in a picture ({found[0]}) are not put into prompts here, because they depend on how the "
                "picture is resized: describe them in words, or give token ids"
            )
    return [Segment("bare", ""), image, Segment("text", f"{_BOS} "), *rest, Segment("text", _ANSWER)]
