"""From what a caller writes to a `GenerationRequest`, and from there to what the processor layer takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from mmserve.errors import InvalidRequestError
from mmserve.types import GenerationRequest, ImageInput, ImagePart, Message, SamplingParams, TextPart

__all__ = ["Images", "RequestLike", "as_request", "build_request", "chat_request", "image_inputs", "plain_messages"]

Images: TypeAlias = Any
"""None, one image, or a list or tuple of them. An image is a path, bytes, an open binary file, a PIL image, a NumPy
array, a torch tensor, a data URL, an http(s) URL, or an `ImageInput`."""

RequestLike: TypeAlias = GenerationRequest | Mapping[str, Any] | tuple[Images, str]
"""A request, its fields as a mapping, or an (image, prompt) pair."""


def as_request(value: RequestLike) -> GenerationRequest:
    """A request from any form that `generate_batch` takes.

    Raises:
        InvalidRequestError: It is none of them, or a field is unknown or out of range.
    """
    if isinstance(value, GenerationRequest):
        return value
    if isinstance(value, Mapping):
        return GenerationRequest.model_validate(dict(value))
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], str):
        return GenerationRequest(images=value[0], prompt=value[1])
    raise InvalidRequestError(
        "a request is a GenerationRequest, a mapping of its fields, or an (image, prompt) pair, "
        f"not {type(value).__name__}"
    )


def build_request(
    image: Images | GenerationRequest,
    prompt: str | None,
    /,
    *,
    sampling: SamplingParams | None = None,
    raw: bool = False,
    processor_options: Mapping[str, Any] | None = None,
    priority: int = 0,
    timeout: float | None = None,
    logits_processors: Sequence[Any] = (),
    **sampling_options: Any,
) -> GenerationRequest:
    """The request of one `generate` call; a whole request in place of the image stands alone.

    Raises:
        InvalidRequestError: A field is unknown or out of range, or something stands beside a whole request.
    """
    if isinstance(image, GenerationRequest):
        beside = (prompt, sampling, processor_options, timeout)
        if any(value is not None for value in beside) or raw or priority or logits_processors or sampling_options:
            raise InvalidRequestError("a GenerationRequest carries its own fields: give nothing beside it")
        return image
    return GenerationRequest(
        prompt=prompt if prompt is not None else "",
        images=image,
        raw=raw,
        sampling=_sampling(sampling, sampling_options),
        processor_options=_or_empty(processor_options),
        priority=priority,
        timeout=timeout,
        logits_processors=logits_processors,  # type: ignore[arg-type] # the type makes a tuple of it
    )


def chat_request(
    messages: Sequence[Message | Mapping[str, Any]],
    /,
    *,
    sampling: SamplingParams | None = None,
    processor_options: Mapping[str, Any] | None = None,
    priority: int = 0,
    timeout: float | None = None,
    logits_processors: Sequence[Any] = (),
    **sampling_options: Any,
) -> GenerationRequest:
    """The request of one `chat` call.

    Raises:
        InvalidRequestError: A field is unknown or out of range.
    """
    fields: dict[str, Any] = {"messages": messages, "processor_options": _or_empty(processor_options)}
    return GenerationRequest(
        **fields,
        sampling=_sampling(sampling, sampling_options),
        priority=priority,
        timeout=timeout,
        logits_processors=logits_processors,  # type: ignore[arg-type] # the type makes a tuple of it
    )


def _or_empty(options: Mapping[str, Any] | None) -> Any:
    """What is no mapping is passed on as it is, for the type's own check to refuse."""
    return {} if options is None else options


def _sampling(sampling: SamplingParams | None, options: Mapping[str, Any]) -> SamplingParams:
    if sampling is None:
        return SamplingParams(**options)
    if options:
        names = ", ".join(sorted(options))
        raise InvalidRequestError(f"give either sampling= or single options ({names}), not both")
    return sampling


def image_inputs(request: GenerationRequest) -> list[ImageInput]:
    """The request's images in prompt order, from the prompt or from its messages."""
    if request.messages is None:
        return list(request.images)
    turns = (message.content for message in request.messages if not isinstance(message.content, str))
    return [part.image for content in turns for part in content if isinstance(part, ImagePart)]


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as `processors` takes them: dicts of role and content."""
    return [{"role": message.role, "content": _plain_content(message)} for message in messages]


def _plain_content(message: Message) -> str | list[dict[str, Any]]:
    if isinstance(message.content, str):
        return message.content
    return [_plain_part(part) for part in message.content]


def _plain_part(part: TextPart | ImagePart) -> dict[str, Any]:
    if isinstance(part, ImagePart):
        return {"type": "image", "image": part.image.source}
    return {"type": "text", "text": part.text}
