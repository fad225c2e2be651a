"""The command: a family and a folder of one's own compared, a difference that it finds, and where there is nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForImageTextToText

from fixtures.tiny_models.families import FAMILIES
from fixtures.tiny_models.family import randomise
from fixtures.tiny_models.shrink import tiny_config
from fixtures.tiny_processors.builders import build
from fixtures.tiny_processors.matched import matched
from mmserve.cli import main
from mmserve.conformance import compare, families
from mmserve.errors import ConfigError

SHORT = ("--short", "--new-tokens", "3")


@pytest.fixture
def own_folder(tmp_path: Path) -> Path:
    """A LLaVA as `save_pretrained` writes it, with its processor."""
    recipe, overrides = matched("llava")
    processor = build("llava", recipe)
    config = tiny_config("llava", {**FAMILIES["llava"].config, **overrides})
    config.text_config.vocab_size = len(processor.tokenizer)
    config.image_token_id = processor.image_token_id
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    randomise(model, 0)
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    return tmp_path


def test_a_family_as_json() -> None:
    result = CliRunner().invoke(main, ["conformance", "--family", "llama", "--json", *SHORT])
    (line,) = result.stdout.splitlines()
    answer = json.loads(line)
    assert result.exit_code == 0
    assert (answer["name"], answer["path"], answer["compared"], answer["failure"]) == ("llama", "paged", "text", None)
    assert 0 <= answer["worst"] <= compare.TOLERANCE


def test_a_folder_of_one_s_own_and_a_difference_in_it(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["conformance", "--model", str(own_folder), *SHORT]
    result = CliRunner().invoke(main, asked)
    assert result.exit_code == 0
    assert "paged     text, one image, two images of different sizes: equal, largest difference" in result.output
    monkeypatch.setattr(compare, "TOLERANCE", -1.0)  # no difference is small enough
    result = CliRunner().invoke(main, asked)
    assert result.exit_code == 1
    assert "ConformanceError: prompt 0: log-probabilities differ by" in result.output


def test_family_and_model_exclude_each_other() -> None:
    result = CliRunner().invoke(main, ["conformance", "--family", "llama", "--model", "."])
    assert result.exit_code == 2
    assert "exclude each other" in result.output


def test_an_unknown_family_is_named_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no tiny model of 'nobody'; known: apertus, .*qwen3_vl"):
        families.known_families(("llama", "nobody"))


def test_without_a_checkout_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(families.mmserve, "__file__", str(tmp_path / "mmserve" / "__init__.py"))
    with pytest.raises(ConfigError, match="run from a checkout, or name a model folder of your own with --model"):
        families.family_names()
