"""Errors of the processor layer.

    ProcessorError              something about this input or this processor
    ├── MediaError              an image could not be read, is too large, or is refused
    │   └── MediaFetchError     an image URL could not be fetched, or its address is refused
    ├── PromptError             messages, text, ids and images do not fit together
    ├── OptionError             a processor option that this processor does not take, or a value out of range
    └── UnsupportedProcessorError   this folder's processor can not be used, with the reason

Every message names the thing, the numbers and the way out, and is bounded: it never repeats a payload.
"""

from __future__ import annotations

__all__ = [
    "MediaError",
    "MediaFetchError",
    "OptionError",
    "ProcessorError",
    "PromptError",
    "UnsupportedProcessorError",
    "shorten",
]


class ProcessorError(Exception):
    """Base of everything that `processors` raises on purpose."""


class MediaError(ProcessorError):
    """An image could not be read, is over a limit, or is refused."""


class MediaFetchError(MediaError):
    """An image URL could not be fetched, or its address is refused."""


class PromptError(ProcessorError):
    """Messages, text, ids and images do not fit together."""


class OptionError(ProcessorError):
    """A processor option is unknown to this processor, or its value is out of range."""


class UnsupportedProcessorError(ProcessorError):
    """This model's processor can not be used; the message says why."""


def shorten(value: object, limit: int = 100) -> str:
    """`repr(value)`, cut to `limit` characters, so that an error never carries a payload."""
    text = value[: limit + 1] if isinstance(value, (str, bytes)) else value
    shown = repr(text)
    return shown if len(shown) <= limit else shown[: limit - 3] + "..."
