"""A model whose packed path turns out to differ, after it was routed and replaced, answers through `generate()`."""

from __future__ import annotations

from pathlib import Path

import pytest

from fixtures.tiny_models.conformance import Case
from fixtures.tiny_models.families import FAMILIES
from mmserve.errors import UnsupportedModelError
from mmserve.model import load as loading


@pytest.mark.parametrize("name", ["llama", "qwen2_vl"])
def test_it_answers_as_generate_does(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def differ(*_: object) -> None:
        raise UnsupportedModelError("on a trial text the packed path differs")

    monkeypatch.setattr(loading, "check_agreement", differ)
    case = Case(FAMILIES[name], tmp_path)
    case.compare(new_tokens=3)
    about = case.model.describe()
    assert (about["path"], about["path_reason"]) == ("generate", "on a trial text the packed path differs")
