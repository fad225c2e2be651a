"""A folder that can not be loaded is refused with the name of the thing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging

from fixtures.tiny_models.families import FAMILIES
from fixtures.tiny_models.family import build
from mmserve.errors import (
    BackendError,
    ConfigError,
    ModelLoadError,
    ModelNotFoundError,
    UnsupportedModelError,
    WeightsError,
)
from mmserve.model import load_model
from mmserve.model.precision import resolve_device


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(FAMILIES["smolvlm"], tmp_path_factory.mktemp("smolvlm"))


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def load(folder: Path, **options: object) -> None:
    load_model(folder, block_size=16, **{"device": "cpu", **options})  # type: ignore[arg-type]


def edit_config(folder: Path, change: Callable[[dict[str, object]], None]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no model folder '.*nowhere'"):
        load(tmp_path / "nowhere")


def test_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        load(folder)


def test_config_is_not_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(UnsupportedModelError, match=r"config\.json is not JSON"):
        load(folder)


def test_config_without_model_type(folder: Path) -> None:
    edit_config(folder, lambda config: config.pop("model_type"))
    with pytest.raises(UnsupportedModelError, match="names no model_type"):
        load(folder)


def test_unknown_architecture(folder: Path) -> None:
    edit_config(folder, lambda config: config.update(model_type="llava_of_tomorrow"))
    with pytest.raises(UnsupportedModelError, match="llava_of_tomorrow"):
        load(folder)


def test_an_architecture_that_writes_no_text(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "clip"}))
    with pytest.raises(UnsupportedModelError, match="no image\\+text or causal language model for 'clip'"):
        load(folder)


def test_contradicting_config(folder: Path) -> None:
    edit_config(folder, lambda config: config["text_config"].update(num_attention_heads=3))  # type: ignore[attr-defined]
    with pytest.raises(
        UnsupportedModelError, match=r"hidden size \(64\) is not a multiple of the number of attention heads \(3\)"
    ):
        load(folder)


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match="holds no weights"):
        load(folder)


def test_pickled_weights_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"pickled weights only \(pytorch_model\.bin\)"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 4, 2000, -1])
def test_truncated_weights(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(WeightsError, match=r"model\.safetensors .*truncated or not safetensors"):
        load(folder)


def test_a_shard_is_missing(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=r"not there: model-00002-of-00002\.safetensors"):
        load(folder)


def test_missing_and_unexpected_names_are_listed(folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.bias_of_old"] = tensors.pop("lm_head.weight")

    edit_weights(folder, change)
    with pytest.raises(WeightsError, match=r"1 missing: lm_head\.weight; 1 unexpected: lm_head\.bias_of_old"):
        load(folder)


def test_wrong_shape(folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].contiguous()

    edit_weights(folder, change)
    with pytest.raises(WeightsError, match=r"1 of the wrong shape: lm_head\.weight \(299, 64\) for \(300, 64\)"):
        load(folder)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dtype": "int8"}, ConfigError, "dtype 'int8' is not supported; known: auto, float32"),
        ({"device": "tpu9"}, ConfigError, "unknown device 'tpu9'"),
        ({"device": "meta"}, ConfigError, "device 'meta' is not supported"),
        ({"attention_backend": "flash9"}, BackendError, "unknown attention backend 'flash9'"),
    ],
)
def test_options(whole: Path, options: dict[str, str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        load(whole, **options)


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda:1").index == 1
    with pytest.raises(ConfigError, match=r"'cuda:7' was asked for, and there are 2"):
        resolve_device("cuda:7")


def test_a_device_that_is_too_small(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.nn.Module, "to", full)
    with pytest.raises(ModelLoadError, match="can not be put on 'cpu': CUDA out of memory"):
        load(whole)


@pytest.mark.parametrize("content", ["{", "[1]", '{"max_new_tokens": "many"}', '{"cache_implementation": 5}'])
def test_a_damaged_generation_config_is_named(folder: Path, content: str) -> None:
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(UnsupportedModelError, match=r"generation_config\.json of .* can not be read"):
        load(folder)


def test_a_backend_can_not_be_forced_where_none_is_used(whole: Path) -> None:
    with pytest.raises(BackendError, match=r"'reference' can not be forced: .*generate\(\)"):
        load(whole, attention_backend="reference", path="generate")


def test_loading_prints_nothing(whole: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def hook(factory: Callable[..., object], args: tuple[object, ...], options: dict[str, object]) -> object:
        return factory(*args, **options)

    previous = logging.set_tqdm_hook(hook)
    try:
        load(whole)
    finally:
        restored = logging.set_tqdm_hook(previous)
    assert restored is hook
    assert capfd.readouterr() == ("", "")


def test_blocks_are_counted_in_the_size_of_what_generate_keeps(whole: Path) -> None:
    """Two layers' keys and values, not the least that a spec can say: 2 million blocks in a gigabyte."""
    model = load_model(whole, block_size=16, device="cpu", dtype="float32", path="generate")
    text = json.loads((whole / "config.json").read_text())["text_config"]
    size = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    kept = 2 * text["num_hidden_layers"] * text["num_key_value_heads"] * size * 4
    assert kept <= model.cache_spec().bytes_per_token() <= kept + 8
