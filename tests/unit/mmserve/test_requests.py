"""Every form in which a caller may write a request."""

from __future__ import annotations

from typing import Any

import pytest

from mmserve.errors import InvalidRequestError
from mmserve.requests import as_request, build_request, image_inputs, plain_messages
from mmserve.types import GenerationRequest, SamplingParams


def test_requests_mappings_and_pairs() -> None:
    request = GenerationRequest(prompt="what?", images=["a.png"])
    assert as_request(request) is request
    assert as_request({"prompt": "what?", "images": ["a.png"]}) == request
    assert as_request(("a.png", "what?")) == request


@pytest.mark.parametrize("value", ["what?", 3, None, ("a.png",), ("a.png", "b.png", "what?"), ("a.png", 3)])
def test_anything_else_is_refused(value: object) -> None:
    with pytest.raises(InvalidRequestError, match="a request is"):
        as_request(value)  # type: ignore[arg-type]


def _build(
    image: object, prompt: str | None = None, sampling_options: dict[str, Any] | None = None, **call: Any
) -> GenerationRequest:
    return build_request(image, prompt, **call, **(sampling_options or {}))


def test_sampling_whole_or_by_options_but_not_both() -> None:
    whole = SamplingParams(max_tokens=3)
    assert _build(None, "x", sampling=whole).sampling is whole
    assert _build(None, "x", sampling_options={"max_tokens": 3}).sampling == whole
    with pytest.raises(InvalidRequestError, match=r"either sampling= or single options \(seed\)"):
        _build(None, "x", sampling=whole, sampling_options={"seed": 1})
    with pytest.raises(InvalidRequestError, match="unknown field 'sed'"):
        _build(None, "x", sampling_options={"sed": 1})


@pytest.mark.parametrize(
    "beside",
    [
        {"prompt": "y"},
        {"sampling": SamplingParams()},
        {"raw": True},
        {"processor_options": {}},
        {"priority": 1},
        {"timeout": 1.0},
        {"sampling_options": {"seed": 1}},
    ],
)
def test_a_whole_request_stands_alone(beside: dict[str, Any]) -> None:
    request = GenerationRequest(prompt="x")
    assert _build(request) is request
    with pytest.raises(InvalidRequestError, match="nothing beside it"):
        _build(request, **beside)


def test_images_of_messages_come_in_order_with_their_ids() -> None:
    part = {"type": "image", "image": {"source": "b.png", "uuid": "b"}}
    messages = [
        {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "?"}, part]},
        {"role": "assistant", "content": "!"},
        {"role": "user", "content": [{"type": "image", "image": "c.png"}]},
    ]
    request = GenerationRequest(messages=messages)
    assert [(image.source, image.uuid) for image in image_inputs(request)] == [
        ("a.png", None), ("b.png", "b"), ("c.png", None),
    ]  # fmt: skip
    assert request.messages is not None
    assert plain_messages(request.messages)[:2] == [
        {
            "role": "user",
            "content": [
                {"type": "image", "image": "a.png"},
                {"type": "text", "text": "?"},
                {"type": "image", "image": "b.png"},
            ],
        },
        {"role": "assistant", "content": "!"},
    ]
