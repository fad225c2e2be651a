"""The command's own errors: what it says where there is nothing to compare."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from mmserve.cli import main
from mmserve.conformance import families
from mmserve.errors import ConfigError


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
