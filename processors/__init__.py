"""Prompts and pictures in, token ids, exact image ranges and exact image tensors out.

    types      PlaceholderRange, ImageItem, ProcessedPrompt
    errors     the error tree
    features   an image given as the rows that a model made of it
    picture    one picture, packed
    media      any form of an image -> one upright 8-bit RGB picture, within limits (decode, arrays, dataurl, fetch)
    hashing    the content key of one image
    chat       messages and raw prompts -> segments of text whose image positions are known
    encode     segments -> ids and spans, user text never read as control tokens
    given_ids  ids as a prompt: placeholders filled in, expansions recognised
    expand     one image -> its tensors and the text that stands for it, by the model's own processor
    images     the images of a prompt, side by side, through a cache
    ranges     spans -> ranges with masks, and token types
    counts     the token counts that a processor declares, against those it makes
    options    which options a request may set
    model_config  what a model's config.json says of its text side
    limits     how large they may make an image
    one_thread torch on one core, for images side by side
    sizing     the most tokens that one image can take
    loading    a model folder -> its processor, taken apart
    selfcheck  what is put together here against the processor's own call
    base       PromptProcessor: the whole way
    families/  what single families do differently

The package stands alone: it imports nothing of an engine, and nothing heavy until it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from processors.base import PromptProcessor
    from processors.errors import (
        MediaError,
        MediaFetchError,
        OptionError,
        ProcessorError,
        PromptError,
        UnsupportedProcessorError,
    )
    from processors.features import ImageFeatures
    from processors.media import ImageSource, MediaOptions, load_image
    from processors.sizing import LargestImage
    from processors.types import ImageItem, PlaceholderRange, ProcessedPrompt

__all__ = [
    "ImageFeatures",
    "ImageItem",
    "ImageSource",
    "LargestImage",
    "MediaError",
    "MediaFetchError",
    "MediaOptions",
    "OptionError",
    "PlaceholderRange",
    "ProcessedPrompt",
    "ProcessorError",
    "PromptError",
    "PromptProcessor",
    "UnsupportedProcessorError",
    "load_image",
]

_HOMES = {
    "PromptProcessor": "processors.base",
    "MediaError": "processors.errors",
    "MediaFetchError": "processors.errors",
    "OptionError": "processors.errors",
    "ProcessorError": "processors.errors",
    "PromptError": "processors.errors",
    "UnsupportedProcessorError": "processors.errors",
    "ImageFeatures": "processors.features",
    "ImageSource": "processors.media",
    "MediaOptions": "processors.media",
    "load_image": "processors.media",
    "ImageItem": "processors.types",
    "LargestImage": "processors.sizing",
    "PlaceholderRange": "processors.types",
    "ProcessedPrompt": "processors.types",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'processors' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
