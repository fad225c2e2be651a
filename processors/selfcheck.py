"""The check made when a processor is loaded: what is put together here is what the processor itself makes.

A prompt with two neighbouring images of different shape goes through the processor's own call, and through the parts
of this package. Ids must be equal; every output must belong to an image or to the text, and what is an image's must
stay the same whatever text stands around the image; the rule by which token types
follow from ranges must give the processor's own types; and the number of tokens that it declares must be the number
that it makes. A processor that differs is refused with the difference, so a family that lays prompts out in a new way
can not be served wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from processors.chat import Segment, cut_images
from processors.counts import DeclaredCounts, ImageCounts
from processors.encode import EncodedPrompt, PromptEncoder
from processors.errors import ProcessorError, UnsupportedProcessorError, shorten
from processors.expand import TEXT_OUTPUTS, Expansion, ImageExpander, call_errors
from processors.families import Family
from processors.picture import Picture
from processors.ranges import TypeRule, range_from_ids

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["CheckedProcessor", "check_processor", "count_alone", "counts_of", "image_texts", "put_in"]

_SHAPES = (((64, 48), (40, 90)), ((64, 48), (64, 48)), ((64, 48),))
"""The pictures of the check; the later sets for processors that take no pictures of different size, or only one."""

_TYPE_OUTPUTS = ("mm_token_type_ids", "token_type_ids")


@dataclass(frozen=True, slots=True)
class CheckedProcessor:
    """What the check found out.

    Attributes:
        types: The rule for token types.
        counts: What the processor declares about token counts.
        feature_id: The id at the positions that take a feature row; None if no position takes one.
        tensor_names: Outputs that belong to an image.
        shapes: The (width, height) of the pictures that the processor's own call was compared over.
    """

    types: TypeRule
    counts: DeclaredCounts
    feature_id: int | None
    tensor_names: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]


def put_in(
    processor: Any, family: Family, segments: Sequence[Segment], expansions: Sequence[Expansion]
) -> list[Segment]:
    """The segments that the processor would tokenise: each image as the text that stands for it, in its layout."""
    texts = iter(image_texts(processor, family, expansions))
    filled = [Segment("image", next(texts)) if segment.kind == "image" else segment for segment in segments]
    return filled if family.layout is None else family.layout(processor, filled)


def image_texts(processor: Any, family: Family, expansions: Sequence[Expansion]) -> list[str]:
    """The text that stands for each image of a prompt."""
    texts = [expansion.text for expansion in expansions]
    if family.numbered is None:
        return texts
    return [family.numbered(processor, text, index) for index, text in enumerate(texts)]


def check_processor(
    processor: Any,
    family: Family,
    image_token: str,
    encoder: PromptEncoder,
    expander: ImageExpander,
    model_config: Mapping[str, object],
) -> CheckedProcessor:
    """Run the check. Raises UnsupportedProcessorError with the difference."""
    name = type(processor).__name__
    text, pictures, whole = _own_call(name, expander, family.most_images)
    try:
        expansions = [expander.expand(Picture(picture), {}, alone=len(pictures) == 1) for picture in pictures]
    except ProcessorError as error:
        raise UnsupportedProcessorError(str(error)) from error
    encoded = encoder.encode(put_in(processor, family, list(cut_images(text, image_token)), expansions))
    _check_ids(name, [int(i) for i in whole["input_ids"][0]], list(encoded.token_ids))
    names = {output for expansion in expansions for output in expansion.tensors}
    for output, make in family.prompt_outputs.items():
        made_here = make(processor, encoded.token_ids, [expansion.tensors for expansion in expansions])
        if made_here.tolist() != whole[output].tolist():
            raise UnsupportedProcessorError(f"{name} makes another {output!r} than follows from the prompt's ids")
    unclaimed = set(whole) - TEXT_OUTPUTS - names - set(family.dropped_outputs) - set(family.prompt_outputs)
    if unclaimed:
        raise UnsupportedProcessorError(f"{name} returns outputs that belong to no image: {sorted(unclaimed)}")
    _check_apart_from_text(name, expander, pictures[0])
    types = _type_rule(name, processor, whole, encoded)
    feature_id = _feature_id(model_config, encoded) if family.takes_rows else None
    made = {picture.size: count_alone(picture, expander, encoder, feature_id, types) for picture in pictures}
    expander.try_planes([_pattern(picture.size) for picture in pictures])
    return CheckedProcessor(
        types=types,
        counts=DeclaredCounts.find(processor, made, family.declares_counts),
        feature_id=feature_id,
        tensor_names=tuple(sorted(names)),
        shapes=tuple(picture.size for picture in pictures),
    )


def count_alone(
    picture: Image.Image, expander: ImageExpander, encoder: PromptEncoder, feature_id: int | None, types: TypeRule
) -> ImageCounts:
    """What a picture takes that is the only one of its prompt."""
    encoded = encoder.encode([Segment("bare", ""), Segment("image", expander.expand(Picture(picture), {}).text)])
    return counts_of(encoded, encoded.image_spans[0], feature_id, types)


def _pattern(size: tuple[int, int]) -> Picture:
    """A picture in which hardly two neighbouring values are equal, whatever the order of its dimensions."""
    import numpy
    from PIL import Image

    width, height = size
    values = (numpy.arange(3 * width * height) * 37 % 251).astype(numpy.uint8)
    return Picture(Image.fromarray(values.reshape(height, width, 3)))


def counts_of(encoded: EncodedPrompt, span: tuple[int, int], feature_id: int | None, types: TypeRule) -> ImageCounts:
    """What the image at `span` takes."""
    placed = range_from_ids(encoded.token_ids, span, feature_id)
    return ImageCounts(placed.num_embeds, types.count(encoded.token_ids, span), placed.length)


def _feature_id(model_config: Mapping[str, object], encoded: EncodedPrompt) -> int:
    """The id at which the model places rows: as its configuration says, else the most frequent of an image."""
    start, end = encoded.image_spans[0]
    inside = encoded.token_ids[start:end]
    for name in ("image_token_id", "image_token_index"):
        candidate = model_config.get(name)
        if isinstance(candidate, int) and candidate in inside:
            return candidate
    return max(inside, key=inside.count)


def _own_call(name: str, expander: ImageExpander, most: int | None) -> tuple[str, list[Image.Image], Mapping[str, Any]]:
    """The prompt, its pictures, and what the processor makes of them; over as many pictures as it takes."""
    from PIL import Image

    refusals: list[Exception] = []
    for shapes in _SHAPES:
        if most is not None and len(shapes) > most:
            continue
        pictures = [Image.new("RGB", size, colour) for size, colour in zip(shapes, ("red", "blue"), strict=False)]
        text = expander.image_text * len(pictures) + "\nWhat differs?"
        try:
            return text, pictures, expander.call(text, pictures, {})
        except call_errors() as error:
            refusals.append(error)
    raise UnsupportedProcessorError(f"{name} fails on a plain prompt: {shorten(str(refusals[0]), 300)}") from refusals[
        0
    ]


def _check_ids(name: str, own: list[int], ours: list[int]) -> None:
    if own == ours:
        return
    at = next((i for i, (a, b) in enumerate(zip(own, ours, strict=False)) if a != b), min(len(own), len(ours)))
    raise UnsupportedProcessorError(
        f"{name} lays prompts out in a way that is not known here: it makes {len(own)} ids and we make {len(ours)}, "
        f"different from index {at} on ({own[at : at + 4]} against {ours[at : at + 4]})"
    )


def _check_apart_from_text(name: str, expander: ImageExpander, picture: Image.Image) -> None:
    """Raises UnsupportedProcessorError if an output that is taken for an image's changes with the prompt's text.

    It would be kept with the image, and be another prompt's when the image is seen again.
    """
    import torch

    texts = (expander.image_text, f"{expander.image_text}\nWhat is it, and why?")
    bare, asked = (expander.image_outputs(expander.call(text, [picture], {})) for text in texts)
    same = {output for output in bare.keys() & asked.keys() if torch.equal(bare[output], asked[output])}
    changing = sorted((bare.keys() | asked.keys()) - same)
    if changing:
        raise UnsupportedProcessorError(f"{name} returns outputs of an image that change with the text: {changing}")


def _type_rule(name: str, processor: Any, whole: Mapping[str, Any], encoded: EncodedPrompt) -> TypeRule:
    own = next((whole[output] for output in _TYPE_OUTPUTS if output in whole), None)
    if own is None:
        return TypeRule("none")
    wanted = tuple(int(i) for i in own[0])
    ids = frozenset(int(i) for i in processor.image_token_ids if i is not None)
    for rule in (TypeRule("ids", ids), TypeRule("span", ids)):
        if rule.types(encoded.token_ids, encoded.image_spans) == wanted:
            return rule
    raise UnsupportedProcessorError(f"{name} gives token types that follow neither from its image ids nor its ranges")
