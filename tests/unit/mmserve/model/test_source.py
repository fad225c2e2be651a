"""Naming a model: a folder, a hub id, or a mistake."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from mmserve.assembly import resolve_folder
from mmserve.errors import ConfigError, ModelNotFoundError
from mmserve.model.source import resolve_model_folder


def test_a_folder_with_a_config_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model_folder(tmp_path) == tmp_path
    assert resolve_model_folder(str(tmp_path)) == tmp_path


def test_what_is_no_model_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"holds no config\.json"):
        resolve_model_folder(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match="is a file"):
        resolve_model_folder(file)
    with pytest.raises(ModelNotFoundError, match="there is no folder"):
        resolve_model_folder(tmp_path / "missing")


def test_a_hub_id_without_network_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelNotFoundError, match=r"'owner/name'.*hub can not be reached.*hf download owner/name"):
        resolve_model_folder("owner/name")


def test_a_hub_id_resolves_to_the_hubs_folder_without_pickled_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: dict[str, object] = {}

    def download(name: str, **options: object) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model_folder("owner/name", revision="v1") == tmp_path
    assert asked["name"] == "owner/name"
    assert asked["revision"] == "v1"
    assert not any("bin" in str(pattern) for pattern in asked["allow_patterns"])  # type: ignore[attr-defined]


def test_python_files_are_fetched_only_for_remote_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[list[str]] = []

    def download(name: str, **options: object) -> str:
        asked.append(list(options["allow_patterns"]))  # type: ignore[call-overload]
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    resolve_folder("owner/name")
    resolve_folder("owner/name", "main", trust_remote_code=True)
    assert ["*.py" in patterns for patterns in asked] == [False, True]


def test_a_revision_without_a_hub_id_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for model in (tmp_path, None):
        with pytest.raises(ConfigError, match="revision 'v1' is for a hub id"):
            resolve_folder(model, "v1")
