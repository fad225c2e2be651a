"""A folder that can not be loaded is refused with the name of the thing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MambaForCausalLM
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
from mmserve.model import load as loading
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
    with pytest.raises(WeightsError, match=r"pickled weights only \(pytorch_model\.bin\).*allow_pickled_weights=True"):
        load(folder)


class _Bomb:
    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return (pytest.fail, ("a pickle was run",))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"bomb": _Bomb()}, "holds something else than tensors, which was not unpickled"),
        ({"model": {"a": torch.zeros(1)}}, "is not a plain state dict"),
        ([torch.zeros(1)], "is not a plain state dict"),
        (b"PK not a pickle", "holds something else than tensors, which was not unpickled"),
        (b"", r"\(0 bytes\) is truncated or no file of torch\.save"),
    ],
    ids=["code", "nested", "list", "garbage", "empty"],
)
def test_pickled_weights_that_are_none(folder: Path, content: object, message: str) -> None:
    (folder / "model.safetensors").unlink()
    path = folder / "pytorch_model.bin"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(WeightsError, match=message):
        load(folder, allow_pickled_weights=True)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({}, "it names none"),
        ({"a": 5}, "it names none"),
        ({"a": "../b.safetensors"}, r"files outside the folder: \.\./b"),
        ({"a": "/b.safetensors"}, "files outside the folder"),
        ([], "is not an index"),
    ],
)
def test_a_damaged_index(folder: Path, weight_map: object, message: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(WeightsError, match=message):
        load(folder)


def test_a_tensor_in_two_shards(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "1.safetensors")
    shutil.copy(folder / "1.safetensors", folder / "2.safetensors")
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=r"is both in .*1\.safetensors and in .*2\.safetensors"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("adapter_config.json", "it is an adapter: merge it"),
        ("model-00001-of-00002.safetensors", "only model-00001-of-00002.safetensors: an index must say"),
        ("model.gguf", "only model.gguf"),
    ],
)
def test_weights_of_another_kind(folder: Path, name: str, message: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"{}")
    with pytest.raises(WeightsError, match=message):
        load(folder)


def test_quantised_weights(folder: Path) -> None:
    edit_config(folder, lambda config: config["text_config"].update(quantization_config={"quant_method": "fp8"}))  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedModelError, match=r"are quantised \(fp8\), which is not served"):
        load(folder)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda config: config.pop("text_config"), WeightsError, "do not fit its config"),
        (lambda config: config.update(text_config="none"), UnsupportedModelError, "can not be read"),
        (lambda config: config.update(vision_config=[]), ModelLoadError, "."),
        (lambda config: config["text_config"].update(num_key_value_heads=0), ModelLoadError, "."),
        (
            lambda config: config["text_config"].update(num_hidden_layers=1),
            WeightsError,
            "unexpected: model.text_model",
        ),
        (lambda config: config["text_config"].update(num_hidden_layers=3), WeightsError, "missing: model.text_model"),
        (lambda config: config["text_config"].update(hidden_act="wish"), UnsupportedModelError, "wish"),
        (
            lambda config: config["text_config"].update(vocab_size=-1),
            UnsupportedModelError,
            "vocab_size is -1, and must",
        ),
        (lambda config: config["vision_config"].update(model_type=[]), ModelLoadError, "can not be put on"),
    ],
    ids=[
        "no-text",
        "text-name",
        "vision-list",
        "no-heads",
        "fewer",
        "more",
        "activation",
        "vocabulary",
        "type",
    ],
)
def test_a_config_that_contradicts_itself_or_the_weights(
    folder: Path, change: Callable[[dict[str, Any]], None], error: type[Exception], message: str
) -> None:
    edit_config(folder, change)
    with pytest.raises(error, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("part", "field", "value", "message"),
    [
        (
            "text_config.rope_parameters",
            "rope_theta",
            0,
            "rope_parameters.rope_theta is 0.*, and must be greater than 0",
        ),
        ("text_config.rope_parameters", "rope_theta", -1e4, "rope_parameters.rope_theta is -10000.0"),
        ("text_config", "rms_norm_eps", float("nan"), "text_config.rms_norm_eps is nan, and must be greater than 0"),
        ("text_config", "sliding_window", -4, "text_config.sliding_window is -4, and must be at least 0"),
        ("text_config", "num_key_value_heads", 3, "is 3, which does not divide the 4 of num_attention_heads"),
        ("vision_config", "num_attention_heads", -4, "vision_config.num_attention_heads is -4"),
    ],
)
def test_a_number_that_can_not_be(folder: Path, part: str, field: str, value: float, message: str) -> None:
    def change(config: dict[str, Any]) -> None:
        for name in part.split("."):
            config = config[name]
        config[field] = value

    edit_config(folder, change)
    with pytest.raises(UnsupportedModelError, match=message):
        load(folder)


def test_a_library_that_is_not_installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    edit_config(folder, lambda config: config["vision_config"].update(model_type="timm_wrapper"))  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedModelError, match=r"'timm_wrapper' needs timm, which is not installed: pip install"):
        load(folder)


def test_rotary_numbers_of_each_kind_of_layer(tmp_path: Path) -> None:
    build(FAMILIES["gemma3"], tmp_path)
    edit_config(
        tmp_path,
        lambda config: config["text_config"]["rope_parameters"]["sliding_attention"].update(rope_theta=0),  # type: ignore[index]
    )
    with pytest.raises(UnsupportedModelError, match=r"rope_parameters\.sliding_attention\.rope_theta is 0"):
        load(tmp_path)


def test_a_proven_family_that_does_not_run_is_not_handed_to_generate(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise UnsupportedModelError("the plain model does not run on a trial text: it is broken")

    monkeypatch.setattr(loading, "plain_logits", fail)
    with pytest.raises(
        ModelLoadError, match="it is broken; models of this kind do, so its config or its weights"
    ) as info:
        load(whole)
    assert not isinstance(info.value, UnsupportedModelError)


def test_a_language_model_that_does_not_run_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("shapes do not fit")

    build(FAMILIES["mamba"], tmp_path)
    monkeypatch.setattr(MambaForCausalLM, "forward", fail)
    with pytest.raises(ModelLoadError, match=r"MambaForCausalLM does not run on a trial text.* shapes do not fit"):
        load(tmp_path)


def test_weights_that_are_not_numbers(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors["lm_head.weight"].fill_(float("nan")))  # type: ignore[arg-type,return-value]
    with pytest.raises(ModelLoadError, match=r"not finite on a trial text, in torch\.float32"):
        load(folder)


def test_code_that_is_not_trusted(folder: Path) -> None:
    edit_config(folder, lambda config: config.update(model_type="own", auto_map={"AutoConfig": "own.Own"}))
    with pytest.raises(UnsupportedModelError, match=r"comes as Python code .* pass trust_remote_code=True"):
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
