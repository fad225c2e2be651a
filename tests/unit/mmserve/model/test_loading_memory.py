"""Loading takes the model's own memory and little more, at its peak and afterwards."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from mmserve.bench.loading import run
from mmserve.errors import MMServeError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")


def test_the_peak_is_the_model_and_one_tensor(tmp_path: Path) -> None:
    """200 MB in bfloat16, with its layers replaced: 1.7 times that where tensors are read ahead by several threads."""
    config = LlamaConfig(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=10, num_attention_heads=12, num_key_value_heads=4,
        vocab_size=8000, max_position_embeddings=128,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    noise = torch.randn(2**16, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1).copy_(noise.repeat(-(-parameter.numel() // noise.numel()))[: parameter.numel()])
    model.save_pretrained(tmp_path)
    result = run(tmp_path)
    assert result["path"] == "paged"
    assert result["model_size"] > 180
    room = 0.1 * result["model_size"]
    assert result["peak"] < result["model_size"] + result["largest_tensor"] + room
    assert result["kept"] < result["model_size"] + room


def test_what_can_not_be_loaded_is_said(tmp_path: Path) -> None:
    with pytest.raises(MMServeError, match=r"could not be loaded: '.*' holds no config\.json"):
        run(tmp_path)
