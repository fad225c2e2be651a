"""What the probe reads off a model is what the model does; what it can not read is refused with its name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fixtures.tiny_models.families import FAMILIES
from fixtures.tiny_models.family import TinyFamily, build
from mmserve.errors import UnsupportedModelError
from mmserve.model import load_model
from mmserve.model.paged import PagedModel


def load(name: str, folder: Path, **changes: Any) -> PagedModel:
    family = FAMILIES.get(name, TinyFamily(name))
    config: Mapping[str, Any] = {**family.config, **changes}
    folder = build(TinyFamily(name, config), folder)
    model = load_model(folder, block_size=16, device="cpu", path="paged")
    assert isinstance(model, PagedModel)
    return model


def layers(model: PagedModel) -> list[tuple[Any, Any, Any]]:
    about: Any = model.describe()["attention"]
    return [(layer["window"], layer["chunk"], layer["cache"]) for layer in about]


def test_windows_by_layer(tmp_path: Path) -> None:
    model = load("gemma3", tmp_path)
    assert layers(model) == [(6, None, 0), (None, None, 1)]
    assert model.describe()["both_ways"] == "each image"
    assert [layer.window for layer in model.cache_spec().layers] == [6, None]


def test_prefix(tmp_path: Path) -> None:
    assert load("paligemma", tmp_path).describe()["both_ways"] == "whole prompt"


def test_a_window_on_every_layer(tmp_path: Path) -> None:
    assert layers(load("mistral", tmp_path)) == [(6, None, 0), (6, None, 1)]


def test_a_window_in_the_config_that_the_model_does_not_use(tmp_path: Path) -> None:
    """Qwen2 has a window size and a flag that it is off."""
    changes = {"": {"use_sliding_window": False, "sliding_window": 4}}
    assert layers(load("qwen2", tmp_path, **changes)) == [(None, None, 0), (None, None, 1)]


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("mllama", {}, "2 of the 3 text layers"),
        ("qwen3_5", {}, "layers of kind linear_attention"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "dynamic frequencies",
        ),
    ],
)
def test_refused_with_its_name(tmp_path: Path, name: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        load(name, tmp_path, **changes)


def test_sinks_go_to_a_backend_that_has_them(tmp_path: Path) -> None:
    about: Any = load("gpt_oss", tmp_path).describe()["attention"]
    assert {layer["backend"] for layer in about} == {"reference"}
    assert all(any("sinks" in reason for reason in layer["declined"]) for layer in about)


def test_layers_that_share_a_cache_and_spans_on_some_layers(tmp_path: Path) -> None:
    model = load("gemma4", tmp_path)
    assert layers(model) == [(6, None, 0), (None, None, 1), (6, None, 0), (None, None, 1)]
    assert [layer.spec.both_ways for layer in model._layers] == [True, False, True, False]
