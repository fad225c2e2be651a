"""A processed prompt, made readable: tokens with their text and kind, images with their ranges and tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from mmserve.inspect.tiles import Normalization, tile_pictures

if TYPE_CHECKING:
    from PIL import Image

    from processors import PromptProcessor
    from processors.types import ImageItem, ProcessedPrompt

__all__ = ["ImageView", "PromptView", "TileView", "TokenKind", "TokenView", "view_prompt"]

TokenKind: TypeAlias = Literal["text", "special", "image", "structure"]
"""image: takes a feature row; structure: inside an image's range without one; special: a control token of the chat."""


@dataclass(frozen=True, slots=True)
class TokenView:
    """One token of the expanded prompt."""

    index: int
    token_id: int
    text: str
    kind: TokenKind


@dataclass(frozen=True, slots=True)
class TileView:
    """One picture that the tower gets, and the first and last token that its rows go to (None: not told apart)."""

    picture: Image.Image
    first_token: int | None
    last_token: int | None


@dataclass(frozen=True, slots=True)
class ImageView:
    """One image: as it was given, where it stands, and what the processor made of it."""

    number: int
    size: tuple[int, int]
    offset: int
    length: int
    num_embeds: int
    key: str
    tensors: dict[str, tuple[int, ...]]
    tiles: tuple[TileView, ...]


@dataclass(frozen=True, slots=True)
class PromptView:
    """The whole prompt."""

    tokens: tuple[TokenView, ...]
    images: tuple[ImageView, ...]

    def count_kinds(self) -> dict[TokenKind, int]:
        """Tokens of each kind."""
        kinds: tuple[TokenKind, ...] = get_args(TokenKind)
        return {kind: sum(token.kind == kind for token in self.tokens) for kind in kinds}

    def as_json(self) -> dict[str, Any]:
        """JSON-friendly; pictures as their sizes."""
        return {
            "tokens": [
                {"index": t.index, "id": t.token_id, "text": t.text, "kind": t.kind} for t in self.tokens
            ],
            "images": [
                {
                    "number": image.number,
                    "size": list(image.size),
                    "offset": image.offset,
                    "length": image.length,
                    "rows": image.num_embeds,
                    "key": image.key,
                    "tensors": {name: list(shape) for name, shape in image.tensors.items()},
                    "tiles": [
                        {"size": list(t.picture.size), "first_token": t.first_token, "last_token": t.last_token}
                        for t in image.tiles
                    ],
                }
                for image in self.images
            ],
        }  # fmt: skip


def view_prompt(processor: PromptProcessor, prompt: ProcessedPrompt) -> PromptView:
    """Look at `prompt`, which `processor` made."""
    normalization = Normalization.of(processor.pixel_normalization)
    return PromptView(
        tokens=_tokens(processor.tokenizer, prompt),
        images=tuple(
            _image(number, item, tile_pictures(item.tensors, normalization, processor.patch_geometry), processor)
            for number, item in enumerate(prompt.images, start=1)
        ),
    )


def _tokens(tokenizer: Any, prompt: ProcessedPrompt) -> tuple[TokenView, ...]:
    special = set(tokenizer.all_special_ids) | {
        index for index, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special
    }
    kinds: list[TokenKind] = ["special" if token in special else "text" for token in prompt.token_ids]
    for item in prompt.images:
        kinds[item.range.offset : item.range.end] = ["structure"] * item.range.length
        for position in item.range.embed_positions():
            kinds[position] = "image"
    texts = [tokenizer.decode([token]) for token in prompt.token_ids]
    rows = zip(prompt.token_ids, texts, kinds, strict=True)
    return tuple(TokenView(index, token, text, kind) for index, (token, text, kind) in enumerate(rows))


def _image(number: int, item: ImageItem, pictures: list[Image.Image], processor: PromptProcessor) -> ImageView:
    shares = _shares(item, len(pictures), processor.rows_per_tile)
    return ImageView(
        number=number,
        size=item.size,
        offset=item.range.offset,
        length=item.range.length,
        num_embeds=item.range.num_embeds,
        key=item.key,
        tensors={name: tuple(tensor.shape) for name, tensor in item.tensors.items()},
        tiles=tuple(TileView(picture, *tokens) for picture, tokens in zip(pictures, shares, strict=True)),
    )


def _shares(item: ImageItem, count: int, declared: int | None) -> list[tuple[int | None, int | None]]:
    """First and last token of each tile, in order; unknown where the rows are not known to be in equal shares.

    They are if there is one tile, if every tile takes the number of rows that the processor declares, or if tokens of
    the prompt's structure part them into as many equal runs as there are tiles.
    """
    positions = item.range.embed_positions()
    share = len(positions) // count if count else 0
    runs = [start for start, before in zip(positions, (-2, *positions), strict=False) if start != before + 1]
    parted = runs == list(positions[::share]) if share and len(runs) == count else False
    if not share or share * count != len(positions) or not (count == 1 or share == declared or parted):
        return [(None, None)] * count
    return [(positions[i * share], positions[(i + 1) * share - 1]) for i in range(count)]
