"""Checkpoints in the layouts of earlier years load to the same model, tensor for tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from fixtures.tiny_models.families import FAMILIES
from fixtures.tiny_models.family import build
from mmserve.model.build import build_model
from mmserve.model.checkpoint import open_checkpoint
from mmserve.model.precision import Precision

Rename = Callable[[str], str]


def of_llava(name: str) -> str:
    """`language_model.model.*`, `language_model.lm_head`, `vision_tower.*`, `multi_modal_projector.*`."""
    if name.startswith("lm_head."):
        return f"language_model.{name}"
    name = name.removeprefix("model.")
    return name.replace("language_model.", "language_model.model.", 1) if name.startswith("language_model.") else name


def of_qwen(name: str) -> str:
    """`visual.*`, `model.layers.*`, `model.embed_tokens`, `lm_head`."""
    return name.replace("model.visual.", "visual.", 1).replace("model.language_model.", "model.", 1)


def of_the_inner_model(name: str) -> str:
    """As the inner model alone would have saved it: no `model.` in front."""
    return name.removeprefix("model.")


CASES = [
    *((name, of_llava) for name in ("llava", "vipllava", "llava_next", "llava_onevision", "paligemma", "gemma3",
                                    "mistral3", "aya_vision", "internvl", "video_llava")),
    *((name, of_qwen) for name in ("qwen2_vl", "qwen2_5_vl")),
    *((name, of_the_inner_model) for name in ("llama", "smolvlm")),
]  # fmt: skip


def load(folder: Path) -> dict[str, torch.Tensor]:
    cpu = torch.device("cpu")
    config = AutoConfig.from_pretrained(folder)
    built = build_model(open_checkpoint(folder), config, Precision(torch.float32, "asked"), cpu)
    return dict(built.model.state_dict())


@pytest.mark.parametrize(("name", "rename"), CASES, ids=[f"{name}-{rename.__name__}" for name, rename in CASES])
def test_old_names_and_todays(name: str, rename: Rename, tmp_path: Path) -> None:
    folder = build(FAMILIES[name], tmp_path)
    expected = load(folder)
    tied = {tensor.data_ptr(): other for other, tensor in reversed(expected.items())}
    today = {other: expected[other].clone() for other in tied.values()}
    old = {rename(other): tensor for other, tensor in today.items()}
    assert old.keys() != today.keys()
    for layout in (today, old):
        save_file(layout, folder / "model.safetensors", {"format": "pt"})
        found = load(folder)
        assert found.keys() == expected.keys()
        for other, tensor in expected.items():
            assert torch.equal(found[other], tensor), other
