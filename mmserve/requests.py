"""From what a caller writes to a `GenerationRequest`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from mmserve.errors import InvalidRequestError
from mmserve.types import GenerationRequest, SamplingParams

__all__ = ["RequestLike", "as_request", "build_request"]

RequestLike: TypeAlias = GenerationRequest | Mapping[str, Any] | tuple[Any, str]
"""A request, its fields as a mapping, or an (image, prompt) pair."""


def build_request(
    fields: Mapping[str, Any], sampling: SamplingParams | None, sampling_options: Mapping[str, Any]
) -> GenerationRequest:
    """A request of `fields`, its sampling given whole or by single options.

    Raises:
        InvalidRequestError: Both are given, or a field or option is unknown or out of range.
    """
    if sampling is not None and sampling_options:
        names = ", ".join(sorted(sampling_options))
        raise InvalidRequestError(f"give either sampling= or single options ({names}), not both")
    return GenerationRequest(**fields, sampling=sampling or SamplingParams(**sampling_options))


def as_request(value: RequestLike) -> GenerationRequest:
    """A request from any form that `generate_batch` takes.

    Raises:
        InvalidRequestError: It is none of them, or a field is unknown or out of range.
    """
    if isinstance(value, GenerationRequest):
        return value
    if isinstance(value, Mapping):
        return GenerationRequest(**value)
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], str):
        return GenerationRequest(images=value[0], prompt=value[1])
    raise InvalidRequestError(
        "a request is a GenerationRequest, a mapping of its fields, or an (image, prompt) pair, "
        f"not {type(value).__name__}"
    )
