"""How many tokens an image takes, as the processor declares it, against what it makes.

Most processors of transformers can say how many tokens an image of a size takes without processing one. What they
count differs by family: the feature rows, the tokens typed as image tokens, or all that stands for the image. Which
one is found out when the processor is loaded; after that the two must agree for every image. Except under a request's
own options: several processors declare their counts without them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from processors.errors import ProcessorError, UnsupportedProcessorError

__all__ = ["DeclaredCounts", "ImageCounts"]

Kind = Literal["embeds", "typed", "length"]


@dataclass(frozen=True, slots=True)
class ImageCounts:
    """What one processed image takes: feature rows, tokens typed as image tokens, all tokens."""

    embeds: int
    typed: int
    length: int

    def of(self, kind: Kind) -> int:
        """The count of one kind."""
        return int(getattr(self, kind))


class DeclaredCounts:
    """The counts that a processor declares; `kind` is None if it declares none."""

    def __init__(self, processor: Any, kind: Kind | None) -> None:
        self._processor = processor
        self._name = type(processor).__name__
        self.kind = kind
        self._ask = functools.lru_cache(maxsize=1024)(self._ask_processor)

    @classmethod
    def find(cls, processor: Any, made: Mapping[tuple[int, int], ImageCounts], trusted: bool) -> DeclaredCounts:
        """Find out what `processor` counts, from what it made of images by (width, height).

        Raises:
            UnsupportedProcessorError: What it declares is none of the counts.
        """
        if not trusted or not hasattr(processor, "_get_num_multimodal_tokens"):
            return cls(processor, None)
        kinds: tuple[Kind, ...] = ("embeds", "typed", "length")
        for kind in kinds:
            counts = cls(processor, kind)
            if all(counts.declared(size) == own.of(kind) for size, own in made.items()):
                return counts
        size, own = next(iter(made.items()))
        raise UnsupportedProcessorError(
            f"{type(processor).__name__} declares {cls(processor, 'embeds').declared(size)} tokens for an image of "
            f"{size[0]}x{size[1]}, but makes {own.embeds} rows, {own.typed} typed tokens, {own.length} tokens"
        )

    def declared(self, size: tuple[int, int]) -> int | None:
        """Tokens declared for an image of (width, height) without options; None if this processor declares none."""
        return None if self.kind is None else self._ask(size)

    def check(self, size: tuple[int, int], made: ImageCounts) -> None:
        """Raises ProcessorError if the processor made another number of tokens than it declares, without options."""
        if self.kind is None:
            return
        declared = self.declared(size)
        if declared != made.of(self.kind):
            raise ProcessorError(
                f"{self._name} declares {declared} tokens for an image of {size[0]}x{size[1]}, "
                f"but made {made.of(self.kind)} ({self.kind})"
            )

    def _ask_processor(self, size: tuple[int, int]) -> int:
        width, height = size
        counts = self._processor._get_num_multimodal_tokens(image_sizes=[(height, width)])
        return int(counts["num_image_tokens"][0])
