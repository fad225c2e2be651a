"""The public pydantic types: unknown fields refused, ranges held, JSON there and back."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmserve.config import EngineConfig
from mmserve.errors import ConfigError, InvalidRequestError, RequestError
from mmserve.types import GenerationRequest, ImageInput, ImagePart, Message, SamplingParams, TextPart
from processors import ImageFeatures


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("max_tokens", 2**31),
        ("min_tokens", 2**31),
        ("temperature", float("nan")),
        ("temperature", 1e-38),
        ("temperature", 1e-50),
        ("top_k", -1),
        ("top_k", 2**63),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-40),
        ("repetition_penalty", float("inf")),
        ("presence_penalty", 2.1),
        ("logit_bias", {1: float("inf")}),
        ("logit_bias", {1: float("-inf")}),
        ("logit_bias", {1: float("nan")}),
        ("logit_bias", {1: 1e39}),
        ("seed", -1),
        ("logprobs", 101),
        ("stop", ("",)),
        ("bad_words", ""),
        ("stop", "a\ud800"),
        ("bad_words", ["b", "\udfff"]),
        ("allowed_token_ids", ()),
    ],
)
def test_sampling_params_refuse_values_out_of_range(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=f"SamplingParams: {field}"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": True},
        {"max_tokens": "5"},
        {"max_tokens": 5.0},
        {"temperature": "0.5"},
        {"temperature": False},
        {"ignore_eos": 1},
        {"ignore_eos": "no"},
        {"seed": True},
        {"stop_token_ids": [True]},
        {"allowed_token_ids": ["7"]},
        {"logit_bias": {True: 1.0}},
        {"logit_bias": {5: True}},
        {"logit_bias": {5: "1"}},
        {"stop": [5]},
    ],
)
def test_nothing_is_taken_for_a_number_that_is_none(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(fields))):
        SamplingParams(**fields)


def test_options_and_requests_are_as_strict() -> None:
    for fields in ({"num_blocks": True}, {"url_timeout": "3"}, {"enable_prefix_caching": "yes"}):
        with pytest.raises(ConfigError):
            EngineConfig(**fields)
    for fields in ({"priority": True}, {"timeout": "1"}, {"raw": 1}):
        with pytest.raises(InvalidRequestError):
            GenerationRequest(prompt="x", **fields)


def test_numbers_and_lists_as_people_write_them_are_taken() -> None:
    params = SamplingParams(temperature=0, top_p=1, logit_bias={"5": 1}, stop=["a"], stop_token_ids=[3])
    assert (params.temperature, params.logit_bias, params.stop_token_ids) == (0.0, {5: 1.0}, (3,))
    for again in (json.loads(params.model_dump_json()), params.model_dump()):
        assert SamplingParams.model_validate(again) == params
    assert SamplingParams.model_validate_json(params.model_dump_json()) == params


def test_a_request_with_code_in_it_is_never_json() -> None:
    request = GenerationRequest(prompt="x", logits_processors=[lambda ids, scores: scores])
    assert "logits_processors" not in repr(request)
    with pytest.raises(ValueError, match="can not be written as JSON"):
        request.model_dump_json()
    for bad in ("abc", [5], print):
        with pytest.raises(InvalidRequestError, match="list of callables"):
            GenerationRequest(prompt="x", logits_processors=bad)


def test_image_features_are_for_python_only() -> None:
    """No JSON form, and never pydantic's own error; in Python they stay what they are."""
    import torch

    features = ImageFeatures(torch.zeros(4, 8), size=(28, 28))
    part = {"type": "image", "image": features}
    for request in (
        GenerationRequest(messages=[{"role": "user", "content": [part]}]),
        GenerationRequest(prompt="x", images=[features]),
    ):
        for write in (request.model_dump_json, lambda request=request: request.model_dump(mode="json")):
            with pytest.raises(
                InvalidRequestError, match=r"^GenerationRequest can not be .*: image features can not be"
            ):
                write()
        assert GenerationRequest.model_validate(request.model_dump()) == request
    again = GenerationRequest.model_validate(request.model_dump())
    assert again.images[0].source is features


def test_a_picture_that_can_not_be_read_has_no_json_form() -> None:
    image = ImageInput(source=np.full((3, 3), 7.0))
    with pytest.raises(InvalidRequestError, match=r"can not be written as JSON: float values must lie in 0..1"):
        image.model_dump_json()


def test_unknown_fields_are_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidRequestError, match=r"unknown field 'max_token'; known fields: max_tokens, .*seed"):
        SamplingParams(max_token=3)
    with pytest.raises(ConfigError, match="unknown field 'block_sise'"):
        EngineConfig(block_sise=3)


def test_contradicting_lengths_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="min_tokens 5 is more than max_tokens 3"):
        SamplingParams(min_tokens=5, max_tokens=3)


def test_errors_are_part_of_the_tree_and_value_errors() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(max_tokens=-1)
    assert isinstance(caught.value, ValueError)
    assert caught.value.__cause__ is None


def test_an_error_never_repeats_a_payload() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        GenerationRequest(prompt="x", images=["a.png"], raw="z" * 100_000)
    assert len(str(caught.value)) < 400


def test_requests_are_frozen() -> None:
    request = GenerationRequest(prompt="x")
    with pytest.raises(ValueError, match="frozen"):
        request.prompt = "y"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "either a prompt or messages"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "either a prompt or messages"),
        ({"prompt": ""}, "an empty prompt needs at least one image"),
        ({"prompt": " \n"}, "an empty prompt needs at least one image"),
        ({"messages": [{"role": "user", "content": "x"}], "images": ["a.png"]}, "messages hold their own images"),
        ({"messages": [{"role": "user", "content": "x"}], "raw": True}, "messages hold their own images"),
        ({"messages": []}, "at least 1 item"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "not 'video'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "text: Field required"),
        ({"prompt": "x", "timeout": 0}, "timeout"),
        ({"prompt": "x", "timeout": float("inf")}, "timeout"),
        ({"prompt": "x", "priority": 2**63}, "priority"),
        ({"prompt": "x", "images": [""]}, "an image needs a path"),
        ({"prompt": "x", "images": [None]}, "an image needs a path"),
    ],
)
def test_requests_that_make_no_sense_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        GenerationRequest(**fields)


def test_one_image_or_several_or_none() -> None:
    assert GenerationRequest(prompt="x", images=None).images == ()
    assert GenerationRequest(prompt="x", images="a.png").images == (ImageInput(source="a.png"),)
    several = GenerationRequest(prompt="x", images=["a.png", ImageInput(source="b.png", uuid="b")])
    assert [image.uuid for image in several.images] == [None, "b"]


def test_openai_parts_are_understood() -> None:
    message = Message(
        role="user",
        content=[
            {"type": "image_url", "image_url": {"url": "https://example.com/a.png", "detail": "auto"}},
            {"type": "image", "image": "b.png"},
            {"type": "text", "text": "hello"},
        ],
    )
    assert message.content == [
        ImagePart(image=ImageInput(source="https://example.com/a.png")),
        ImagePart(image=ImageInput(source="b.png")),
        TextPart(text="hello"),
    ]


def test_an_openai_option_that_would_be_ignored_is_refused() -> None:
    part = {"type": "image_url", "image_url": {"url": "https://a/b.png", "detail": "low"}}
    with pytest.raises(InvalidRequestError, match="image_url takes 'url'"):
        Message(role="user", content=[part])


@pytest.mark.parametrize("url", ["/etc/hostname", "photo.png", "file:///etc/hostname", "", None, 3])
def test_an_image_url_never_opens_a_local_file(url: object) -> None:
    with pytest.raises(InvalidRequestError, match=r"http\(s\) or data URL"):
        Message(role="user", content=[{"type": "image_url", "image_url": {"url": url}}])


def test_requests_round_trip_through_json() -> None:
    request = GenerationRequest(
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "?"}]},
        ],
        sampling=SamplingParams(max_tokens=5, stop="END", logit_bias={3: -1.5}, seed=7),
        processor_options={"max_pixels": 10},
    )
    assert GenerationRequest.model_validate_json(request.model_dump_json()) == request


def test_a_picture_in_memory_round_trips_with_its_pixels() -> None:
    pixels = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)
    request = GenerationRequest(prompt="x", images=[Image.fromarray(pixels), pixels])
    again = GenerationRequest.model_validate_json(request.model_dump_json())
    for image in again.images:
        payload = base64.b64decode(image.source.removeprefix("data:image/png;base64,"))
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(payload))), pixels)


def test_bytes_round_trip_untouched() -> None:
    request = GenerationRequest(prompt="x", images=[b"not even a picture"])
    source = json.loads(request.model_dump_json())["images"][0]["source"]
    assert base64.b64decode(source.partition(",")[2]) == b"not even a picture"


def test_schemas_tell_a_reader_what_fields_mean() -> None:
    sampling = SamplingParams.model_json_schema()["properties"]
    assert all("description" in field for field in sampling.values())
    config = EngineConfig.model_json_schema()["properties"]
    assert all("description" in field for field in config.values())
    request = GenerationRequest.model_json_schema()
    assert request["additionalProperties"] is False
    assert "description" in request["$defs"]["ImageInput"]["properties"]["source"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: SamplingParams(**{f"option_{i}": i for i in range(300)}),
        lambda: SamplingParams(**{"x" * 5000: 1}),
        lambda: SamplingParams(stop=[1] * 500),
        lambda: GenerationRequest(prompt="x", images=[None] * 300),
        lambda: GenerationRequest(messages=[{"role": "robot" * 100}] * 300),
        lambda: Message(role="user", content=[{"type": "v" * 9000}]),
        lambda: EngineConfig(**{f"option_{i}": i for i in range(300)}),
    ],
)
def test_the_message_of_an_error_is_bounded(make: Callable[[], object]) -> None:
    with pytest.raises((InvalidRequestError, ConfigError)) as caught:
        make()
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    "part", [{"type": "text", 5: "a"}, {"type": "image", 5: "a"}, {"type": "image_url", "image_url": {1: 2}}, 5, None]
)
def test_odd_parts_are_our_own_error(part: object) -> None:
    with pytest.raises(InvalidRequestError):
        Message(role="user", content=[part])
