"""PaliGemma over Gemma 2 ("PaliGemma 2"): a prefix that attends both ways, in layers with windows and capped scores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fixtures.tiny_models.conformance import Case
from fixtures.tiny_models.families import FAMILIES


def test_packed_equals_generate(tmp_path: Path) -> None:
    family = replace(FAMILIES["paligemma"], config={"": {"text_config": {"model_type": "gemma2"}}})
    case = Case(family, tmp_path)
    case.compare(new_tokens=8, chunk=3, stagger=1, warm=True)
    about = case.model.describe()
    assert (about["path"], about["both_ways"]) == ("paged", "whole prompt")
    assert [layer["window"] for layer in about["attention"]] == [6, None]  # type: ignore[attr-defined]
