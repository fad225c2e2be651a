"""Models of our own classes: whatever they keep where, it has its value after loading."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mmserve.errors import UnsupportedModelError, WeightsError
from mmserve.model import load_model
from mmserve.model.build import build_model
from mmserve.model.checkpoint import open_checkpoint
from mmserve.model.construct import parameters_on_meta
from mmserve.model.precision import resolve_precision

TINY = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip


class OddConfig(LlamaConfig):
    model_type = "mmserve_test_odd"


class Leaf(nn.Module):
    """A module without children: a parameter, a buffer that is stored, one that is not, and a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))
        self.pair = nn.ParameterList([nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))])
        self.register_buffer("stored", torch.zeros(2))
        self.register_buffer("computed", torch.arange(4.0) * 2, persistent=False)
        self.plain = torch.linspace(0, 1, 5)
        # As remote code does for drop-path schedules: read while it is being constructed.
        self.rates = [rate.item() for rate in torch.linspace(0, 0.5, 3)]


class OddForCausalLM(LlamaForCausalLM):
    config_class = OddConfig

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.direct = nn.Parameter(torch.zeros(4, 2))
        self.counts = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)
        self.register_buffer("kept", torch.zeros(3))
        self.register_buffer("made", torch.tensor([5.0, 6.0]), persistent=False)
        self.leaf = Leaf()
        self.post_init()


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    AutoConfig.register(OddConfig.model_type, OddConfig)
    AutoModelForCausalLM.register(OddConfig, OddForCausalLM)
    yield
    CONFIG_MAPPING._extra_content.pop(OddConfig.model_type)
    AutoModelForCausalLM._model_mapping._extra_content.pop(OddConfig)


@pytest.fixture
def stored(tmp_path: Path) -> OddForCausalLM:
    model = OddForCausalLM(OddConfig(**TINY))
    with torch.no_grad():
        for index, tensor in enumerate([*model.parameters(), model.kept, model.leaf.stored]):
            tensor.copy_(torch.full_like(tensor, index + 1) if not tensor.is_floating_point() else tensor + index + 1)
    model.save_pretrained(tmp_path)
    return model


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    checkpoint = open_checkpoint(folder)
    config = AutoConfig.from_pretrained(folder)
    cpu = torch.device("cpu")
    return build_model(checkpoint, config, resolve_precision(dtype, {}, config, cpu), cpu).model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_everything_has_its_value(stored: OddForCausalLM, tmp_path: Path, dtype: torch.dtype) -> None:
    loaded = load(tmp_path, dtype)
    expected = stored.state_dict()
    found = loaded.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert not tensor.is_meta
        assert tensor.dtype == (dtype if expected[name].is_floating_point() and name != "kept" else tensor.dtype)
        torch.testing.assert_close(tensor, expected[name].to(tensor.dtype), rtol=0, atol=0)
    assert loaded.made.tolist() == [5, 6]
    assert loaded.leaf.computed.tolist() == [0, 2, 4, 6]
    assert loaded.leaf.plain.tolist() == torch.linspace(0, 1, 5).to(loaded.leaf.plain.dtype).tolist()
    assert loaded.leaf.rates == [0.0, 0.25, 0.5]


def test_they_are_registered_parameters_that_are_not_trained(stored: OddForCausalLM, tmp_path: Path) -> None:
    loaded = load(tmp_path)
    for owner, name in ((loaded, "direct"), (loaded, "counts"), (loaded.leaf, "gain"), (loaded.leaf.pair, "1")):
        assert isinstance(owner._parameters[name], nn.Parameter)
        assert not owner._parameters[name].requires_grad


@pytest.mark.parametrize("name", ["direct", "leaf.gain", "leaf.pair.1", "kept", "leaf.stored"])
def test_one_that_is_not_in_the_file_is_missed(stored: OddForCausalLM, tmp_path: Path, name: str) -> None:
    state = {n: t for n, t in stored.state_dict().items() if n != name}
    stored.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(WeightsError, match=f"1 missing: {name}"):
        load(tmp_path)


def test_loading_leaves_the_callers_random_numbers(stored: OddForCausalLM, tmp_path: Path) -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    load(tmp_path)
    assert torch.equal(torch.rand(1), expected)


CODE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "mmserve_test_own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.direct = torch.nn.Parameter(torch.zeros(2))
        self.register_buffer("made", torch.tensor([5.0, 6.0]), persistent=False)
        self.post_init()
"""


def test_code_that_comes_with_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused by default; with `trust_remote_code` it is what is built."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "own.py").write_text(CODE)
    model = LlamaForCausalLM(LlamaConfig(**TINY))
    save_file({**model.state_dict(), "direct": torch.ones(2)}, folder / "model.safetensors", {"format": "pt"})
    auto = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    config = {**model.config.to_dict(), "model_type": "mmserve_test_own", "auto_map": auto}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="pass trust_remote_code=True to run it"):
        load_model(folder, block_size=16, device="cpu")
    loaded: Any = load_model(folder, block_size=16, device="cpu", trust_remote_code=True)
    assert loaded.describe()["class"] == "OwnForCausalLM"
    assert loaded._model.direct.tolist() == [1, 1]
    assert loaded._model.made.tolist() == [5, 6]


def test_only_parameters_go_to_meta_and_only_here() -> None:
    with parameters_on_meta():
        layer = nn.BatchNorm1d(3)
        shared = nn.Linear(2, 2)
        other = nn.Linear(2, 2)
        other.weight = shared.weight
    assert layer.weight.is_meta
    assert not layer.running_mean.is_meta
    assert other.weight is shared.weight
    assert not nn.Linear(2, 2).weight.is_meta
