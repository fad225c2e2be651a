"""Every form in which a caller may write a request."""

from __future__ import annotations

import pytest

from mmserve.errors import InvalidRequestError
from mmserve.requests import as_request, build_request
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


def test_sampling_whole_or_by_options_but_not_both() -> None:
    whole = SamplingParams(max_tokens=3)
    assert build_request({"prompt": "x"}, whole, {}).sampling is whole
    assert build_request({"prompt": "x"}, None, {"max_tokens": 3}).sampling == whole
    with pytest.raises(InvalidRequestError, match=r"either sampling= or single options \(seed\)"):
        build_request({"prompt": "x"}, whole, {"seed": 1})
    with pytest.raises(InvalidRequestError, match="unknown field 'sed'"):
        build_request({"prompt": "x"}, None, {"sed": 1})
