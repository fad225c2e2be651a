"""Prompts and pictures in, token ids, exact image ranges and exact image tensors out.

    types      PlaceholderRange, ImageItem, ProcessedPrompt
    errors     the error tree
    media      any form of an image -> one upright 8-bit RGB picture, within limits
    hashing    the content key of one image
    chat       messages and raw prompts -> text whose image positions are known
    encode     text -> ids with character offsets, user text never read as control tokens
    expand     one image -> its tensors and the text that stands for it, by the model's own processor
    ranges     where each image's text came to lie in the ids
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
    from processors.media import ImageSource, MediaOptions, load_image
    from processors.types import ImageItem, PlaceholderRange, ProcessedPrompt

__all__ = [
    "ImageItem",
    "ImageSource",
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
    "ImageSource": "processors.media",
    "MediaOptions": "processors.media",
    "load_image": "processors.media",
    "ImageItem": "processors.types",
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
