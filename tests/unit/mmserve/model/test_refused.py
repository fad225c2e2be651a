"""Why some architectures are refused: reasons that lie in transformers are tried, so that they do not outlive it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, ShieldGemma2ForImageClassification

from fixtures.tiny_models.family import TinyFamily, build
from fixtures.tiny_models.shrink import tiny_config
from mmserve.errors import UnsupportedModelError
from mmserve.model import load_model
from mmserve.model.refused import REFUSED


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_it_is_refused_by_name_before_a_weight_is_read(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
    (tmp_path / "model.safetensors").write_bytes(b"\x02\x00\x00\x00\x00\x00\x00\x00{}")
    with pytest.raises(UnsupportedModelError, match=f"{name!r} models are not served: "):
        load_model(tmp_path, block_size=16, device="cpu")


def test_gemma_3_finds_none_of_a_shieldgemmas_text_weights(tmp_path: Path) -> None:
    config = tiny_config("shieldgemma2", {"mm_tokens_per_image": 4})
    ShieldGemma2ForImageClassification(config).save_pretrained(tmp_path)
    _, found = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert {name for name in found["missing_keys"] if "language_model" not in name} == {"lm_head.weight"}
    assert "model.language_model.norm.weight" in found["missing_keys"]


def test_llama_4_ends_in_an_attribute_error_of_its_own(tmp_path: Path) -> None:
    build(TinyFamily("llama4"), tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    with pytest.raises(AttributeError, match="image_outputs"):
        model.generate(input_ids=torch.tensor([[5, 6, 7]]), max_new_tokens=2)
