"""What may be left over in weight files: known names, a class's own, a user's; everything else is an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fixtures.tiny_models.families import FAMILIES
from fixtures.tiny_models.family import build
from mmserve.errors import ConfigError, WeightsError
from mmserve.model import load_model
from mmserve.model.leftovers import KNOWN, Leftovers

PATTERNS = ("mtp.*", "*.scale_of_old", "*talker*", "a.whole.name")


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("mtp.layers.0.weight", "mtp.*"),
        ("model.mtp.weight", None),
        ("model.norm.scale_of_old", "*.scale_of_old"),
        ("model.norm.scale_of_old.weight", None),
        ("model.talker.weight", "*talker*"),
        ("a.whole.name", "a.whole.name"),
        ("a.whole.name.more", None),
    ],
)
def test_patterns(name: str, pattern: str | None) -> None:
    assert Leftovers.parse(PATTERNS).match(name) == pattern


@pytest.mark.parametrize("pattern", ["", "*", "**", "a*b", "*a*b*"])
def test_a_pattern_that_is_none(pattern: str) -> None:
    with pytest.raises(ConfigError, match="no pattern of weight names"):
        Leftovers.parse([pattern])


def test_known_ones_are_no_weights() -> None:
    for name in ("model.layers.3.self_attn.rotary_emb.inv_freq", "vision_model.embeddings.position_ids"):
        assert KNOWN.match(name)
    for name in ("position_embedding.weight", "lm_head.weight", "model.layers.0.self_attn.q_proj.bias", "attn.bias"):
        assert KNOWN.match(name) is None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return build(FAMILIES["llama"], tmp_path)


def add(folder: Path, *names: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.update({name: torch.zeros(2) for name in names})
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def left_over(folder: Path, *ignore: str) -> object:
    model = load_model(folder, block_size=16, device="cpu", path="generate", ignore_weights=ignore)
    return model.describe()["weights_left_over"]


def test_what_is_left_over_is_listed_with_the_rule(folder: Path) -> None:
    add(folder, "model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.1.num_batches_tracked", "mtp.head.weight")
    said = left_over(folder, "mtp.*")
    assert said == {
        "model.layers.0.self_attn.rotary_emb.inv_freq": "as its class says",
        "model.layers.1.num_batches_tracked": "*.num_batches_tracked",
        "mtp.head.weight": "mtp.*",
    }
    json.dumps(said)


def test_nothing_is_left_over_without_being_named(folder: Path) -> None:
    assert left_over(folder, "mtp.*") == {}
    add(folder, "mtp.head.weight")
    with pytest.raises(WeightsError, match=r"1 unexpected: mtp\.head\.weight; .*name them in ignore_weights"):
        left_over(folder, "model.mtp.*")


def test_a_weight_of_the_model_is_loaded_whatever_is_ignored(folder: Path) -> None:
    """The list is of what may be left over, not of what to leave out."""
    assert left_over(folder, "*weight", "model.*") == {}
