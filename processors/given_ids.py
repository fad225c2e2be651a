"""Token ids as a prompt: with one placeholder an image, or with every image already expanded.

    one placeholder each    BOS [IMG] What [IMG]                        -> each is replaced by its image's ids
    already expanded        BOS [IMG] [IMG] [END] What [IMG] [END]      -> recognised, image by image, and kept

An expansion that is not exactly what the image's own size makes is refused: such ids were made for another picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from processors.encode import EncodedPrompt
from processors.errors import PromptError, shorten

__all__ = ["ImageIds", "check_ids", "place_in_ids"]


@dataclass(frozen=True, slots=True)
class ImageIds:
    """The ids of one expanded image.

    Attributes:
        ids: All of them.
        core: Half-open range of `ids` from the first to the last that no text can make; text next to an image may
            merge with what lies outside of it.
    """

    ids: tuple[int, ...]
    core: tuple[int, int]

    @classmethod
    def of(cls, ids: Sequence[int], image_token_ids: frozenset[int]) -> ImageIds:
        """Find the core: `image_token_ids` are the ids that stand for images and nothing else."""
        own = [index for index, token_id in enumerate(ids) if token_id in image_token_ids]
        if not own:
            raise PromptError("an image's text makes no image token")
        return cls(tuple(ids), (own[0], own[-1] + 1))


def check_ids(prompt: Sequence[int], num_ids: int) -> None:
    """Raises PromptError if `prompt` holds an id that is none of the model's ids 0 to `num_ids` - 1."""
    for index, token_id in enumerate(prompt):
        if not 0 <= token_id < num_ids:
            raise PromptError(
                f"token id {shorten(token_id, 40)} at index {index} is no token of this model: "
                f"its ids are 0 to {num_ids - 1}"
            )


def place_in_ids(
    prompt: Sequence[int], images: Sequence[ImageIds], placeholder_id: int, image_token_ids: frozenset[int]
) -> EncodedPrompt:
    """Bind the images to their positions in `prompt`.

    Raises:
        PromptError: Neither one placeholder an image nor their exact expansions; the message has the numbers.
    """
    expanded = _expanded_spans(prompt, images, image_token_ids)
    if expanded is not None:
        return EncodedPrompt(tuple(prompt), tuple(expanded))
    if sum(token_id == placeholder_id for token_id in prompt) == len(images):
        return _fill_in(prompt, images, placeholder_id)
    found = sum(token_id in image_token_ids for token_id in prompt)
    wanted = [sum(token_id in image_token_ids for token_id in image.ids) for image in images]
    raise PromptError(
        f"the ids hold {found} image tokens; {len(images)} images take one placeholder each, "
        f"or, expanded for their sizes, {wanted[:20]} image tokens"
    )


def _expanded_spans(
    prompt: Sequence[int], images: Sequence[ImageIds], image_token_ids: frozenset[int]
) -> list[tuple[int, int]] | None:
    """The images' ranges if `prompt` holds exactly their expansions in order; otherwise None."""
    spans: list[tuple[int, int]] = []
    position = 0
    for image in images:
        first, last = image.core
        while position < len(prompt) and prompt[position] not in image_token_ids:
            position += 1
        end = position + last - first
        if tuple(prompt[position:end]) != image.ids[first:last]:
            return None
        whole = (position - first, position - first + len(image.ids))
        earliest = spans[-1][1] if spans else 0
        fits = whole[0] >= earliest and tuple(prompt[whole[0] : whole[1]]) == image.ids
        spans.append(whole if fits else (position, end))
        position = spans[-1][1]
    rest = prompt[position:]
    return None if any(token_id in image_token_ids for token_id in rest) else spans


def _fill_in(prompt: Sequence[int], images: Sequence[ImageIds], placeholder_id: int) -> EncodedPrompt:
    ids: list[int] = []
    spans: list[tuple[int, int]] = []
    remaining = iter(images)
    for token_id in prompt:
        if token_id == placeholder_id:
            spans.append((len(ids), len(ids) + len((image := next(remaining)).ids)))
            ids.extend(image.ids)
        else:
            ids.append(token_id)
    return EncodedPrompt(tuple(ids), tuple(spans))
