"""A library that is too old, or missing, is named with the version it needs."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest

from mmserve.errors import UnsupportedModelError
from mmserve.model import load_model, versions
from mmserve.model.versions import LOADING, PACKED, Requirement, newer_than_installed, require


@pytest.mark.parametrize("requirement", [LOADING, PACKED])
def test_what_is_installed_will_do(requirement: Requirement) -> None:
    require(requirement)


def test_an_older_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions.metadata, "version", lambda name: "5.9.1" if name == "transformers" else "9")
    message = r"loading a model .* needs transformers 5\.24 or newer, and 5\.9\.1 is installed: pip install -U"
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(tmp_path, block_size=16)


def test_one_that_is_not_there_is_named() -> None:
    with pytest.raises(UnsupportedModelError, match="flying needs wings 2 or newer, and it is not installed"):
        require(Requirement("flying", {"wings": "2"}))


@pytest.mark.parametrize("written", ["99.1", "99.0.dev0"])
def test_a_checkpoint_of_a_newer_library(tmp_path: Path, written: str) -> None:
    assert newer_than_installed({"transformers_version": written}) == written
    config = {"model_type": "llava_of_tomorrow", "transformers_version": written}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    installed = metadata.version("transformers")
    message = f"{installed} knows no architecture 'llava_of_tomorrow'. .* by transformers {written}, newer than here"
    with pytest.raises(UnsupportedModelError, match=message.replace("'", "'")):
        load_model(tmp_path, block_size=16)


@pytest.mark.parametrize("config", [{}, {"transformers_version": None}, {"transformers_version": "4.1"}])
def test_others_are_not_newer(config: dict[str, object]) -> None:
    assert newer_than_installed(config) is None
