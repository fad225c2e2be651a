"""What the processor layer hands on: frozen, named, complete.

A prompt of nine tokens with one image of two feature rows (Pixtral-like, one row-end token a row)::

    index        0    1     2     3       4     5       6     7    8
    token        BOS  [IMG] [BRK] [IMG]   [END] What    is    it   ?
                      └──── PlaceholderRange(offset=1, length=4) ┘
    is_embed          True  False True    False

`length` counts every token that stands for the image; `is_embed` marks those that take a feature row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from processors.features import ImageFeatures

__all__ = ["ImageItem", "PlaceholderRange", "ProcessedPrompt"]


@dataclass(frozen=True, slots=True)
class PlaceholderRange:
    """Where one image stands in the expanded prompt.

    Attributes:
        offset: Index of the range's first token in `ProcessedPrompt.token_ids`.
        length: Tokens in the range: feature rows, and row, tile and end tokens between or after them.
        is_embed: One flag a token, True where a feature row is placed; None when every token takes one. All False
            where images are read by cross attention.
    """

    offset: int
    length: int
    is_embed: tuple[bool, ...] | None = None

    def __post_init__(self) -> None:
        if self.offset < 0 or self.length < 1:
            raise ValueError(f"a range needs offset >= 0 and length >= 1, not {self.offset} and {self.length}")
        if self.is_embed is not None and len(self.is_embed) != self.length:
            raise ValueError(f"is_embed has {len(self.is_embed)} flags for {self.length} tokens")

    @property
    def end(self) -> int:
        """Index one past the range's last token."""
        return self.offset + self.length

    @property
    def num_embeds(self) -> int:
        """Feature rows that the range takes."""
        return self.length if self.is_embed is None else sum(self.is_embed)

    def embed_positions(self) -> tuple[int, ...]:
        """Absolute indices of the tokens that take a feature row, ascending; row i goes to entry i."""
        if self.is_embed is None:
            return tuple(range(self.offset, self.end))
        return tuple(self.offset + i for i, flag in enumerate(self.is_embed) if flag)


@dataclass(frozen=True, slots=True)
class ImageItem:
    """One image of one prompt: its key, its place, and exactly its own tensors.

    Attributes:
        key: Content key: equal keys mean equal tensors (pixels, size and every option that changes them).
        range: Where it stands in the prompt.
        tensors: The processor's outputs that belong to this image alone, named as the model's
            `get_image_features` names them and shaped as if the image had been processed alone.
        size: (width, height) of the upright picture before the processor resized it.
        features: The image's rows, if these were given in place of a picture; `tensors` then hold no pixels.
    """

    key: str
    range: PlaceholderRange
    tensors: Mapping[str, torch.Tensor]
    size: tuple[int, int]
    features: ImageFeatures | None = None

    def nbytes(self) -> int:
        """Bytes of memory that the tensors take."""
        return stored_bytes(self.tensors)


def stored_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes of memory that tensors take: those of a view of one value throughout are that value's."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors.values())


@dataclass(frozen=True, slots=True)
class ProcessedPrompt:
    """A prompt ready for a model.

    Attributes:
        token_ids: The expanded ids, every image token included. Length T.
        images: In prompt order.
        mm_token_type_ids: T values: 0 text, 1 image; empty where the family has none.
        prompt_tensors: Outputs that belong to the whole prompt (rare; shape [1, T] or by family).
        text: The prompt's text before image tokens were expanded; empty if ids were given.
        new_bytes: Bytes of image tensors that were made for this prompt, and not found in the cache.
    """

    token_ids: tuple[int, ...]
    images: tuple[ImageItem, ...] = ()
    mm_token_type_ids: tuple[int, ...] = ()
    prompt_tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    text: str = ""
    new_bytes: int = field(default=0, compare=False)

    @property
    def num_image_tokens(self) -> int:
        """Tokens of the prompt that stand for images (structural ones inside the ranges included)."""
        return sum(image.range.length for image in self.images)
