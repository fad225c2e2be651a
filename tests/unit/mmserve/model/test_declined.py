"""A model with layers that look like those that are replaced and are not: `describe()` says so, and answers stay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from fixtures.tiny_models.family import randomise
from mmserve.conformance.compare import Comparison
from mmserve.conformance.folder import folder_subject
from mmserve.kernels.library import status

SIZES = {
    "vocab_size": 120, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 3,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 128,
}  # fmt: skip


class LookAlikeConfig(LlamaConfig):
    model_type = "mmserve_test_look_alike"


class LookAlikeRMSNorm(LlamaRMSNorm):
    """The weight's magnitude alone counts."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight.abs() * hidden_states * scale


class HalvedLinear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) / 2


class LookAlikeForCausalLM(LlamaForCausalLM):
    config_class = LookAlikeConfig

    def __init__(self, config: LookAlikeConfig) -> None:
        super().__init__(config)
        self.model.norm = LookAlikeRMSNorm(config.hidden_size, config.rms_norm_eps)
        first = self.model.layers[0]
        first.input_layernorm = LookAlikeRMSNorm(config.hidden_size, config.rms_norm_eps)
        first.mlp.down_proj = HalvedLinear(config.intermediate_size, config.hidden_size, bias=False)
        self.post_init()


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    AutoConfig.register(LookAlikeConfig.model_type, LookAlikeConfig)
    AutoModelForCausalLM.register(LookAlikeConfig, LookAlikeForCausalLM)
    yield
    CONFIG_MAPPING._extra_content.pop(LookAlikeConfig.model_type)
    AutoModelForCausalLM._model_mapping._extra_content.pop(LookAlikeConfig)


@pytest.mark.skipif(not status().native, reason="without the kernels nothing is replaced")
def test_it_says_what_stays_and_answers_as_before(tmp_path: Path) -> None:
    model = LookAlikeForCausalLM(LookAlikeConfig(**SIZES))
    randomise(model, 0)
    model.model.norm.weight.data.neg_()
    model.save_pretrained(tmp_path)
    comparison = Comparison(folder_subject(tmp_path))
    comparison.compare(new_tokens=6, chunk=4, stagger=1)
    about: Any = comparison.model.describe()
    assert about["path"] == "paged"
    left = {name: why for entry in about["replacements"] for name, why in entry["left_alone"].items()}
    assert {"model.layers.*", "model.norm", "model.layers.*.input_layernorm", "model.layers.*.mlp.down_proj"} <= set(
        left
    )
    assert left["model.norm"] == "LookAlikeRMSNorm computes something else than an RMS norm"
    counts = {entry["what"]: entry["count"] for entry in about["replacements"]}
    assert counts["decoder layers as one native call"] == 1
