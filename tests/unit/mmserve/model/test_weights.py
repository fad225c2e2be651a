"""Every layout that transformers reads loads to the same model; ties and shards included."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from fixtures.tiny_models.families import FAMILIES
from fixtures.tiny_models.family import build, make_prompt
from fixtures.tiny_models.shrink import VOCAB
from mmserve.conformance.packed import PackedRun, run_packed
from mmserve.errors import WeightsError
from mmserve.model import load_model

FAMILY = FAMILIES["llava"]


def logprobs(folder: Path) -> torch.Tensor:
    """Of one prompt with an image, packed."""
    model = load_model(folder, block_size=16, device="cpu")
    assert model.describe()["path"] == "paged"
    return torch.stack(run_packed(model, [make_prompt(FAMILY, [3, (1, 0), 5])], PackedRun(new_tokens=3))[0].logprobs)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(FAMILY, tmp_path_factory.mktemp("whole"))


def rewrite(whole: Path, folder: Path, rename: Callable[[str], str]) -> Path:
    """The same weights under other names."""
    folder.mkdir()
    tensors = load_file(whole / "model.safetensors")
    save_file({rename(name): t for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text((whole / "config.json").read_text())
    return folder


def test_old_and_new_names(whole: Path, tmp_path: Path) -> None:
    """transformers saves LLaVA in its first layout; its modules have other names by now, and both load."""
    old = set(load_file(whole / "model.safetensors"))
    assert any(name.startswith("language_model.model.layers.") for name in old)

    def modern(name: str) -> str:
        name = name.replace("language_model.lm_head", "lm_head").replace("language_model.model.", "language_model.")
        return name if name.startswith("lm_head") else f"model.{name}"

    new = rewrite(whole, tmp_path / "new", modern)
    assert not old & set(load_file(new / "model.safetensors"))
    torch.testing.assert_close(logprobs(new), logprobs(whole), atol=1e-4, rtol=0)


def test_shards(whole: Path, tmp_path: Path) -> None:
    AutoModelForImageTextToText.from_pretrained(whole).save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    torch.testing.assert_close(logprobs(tmp_path), logprobs(whole), atol=1e-4, rtol=0)


@pytest.mark.parametrize("zipped", [True, False], ids=["mapped", "before-torch-1.6"])
def test_pickled_weights_that_are_asked_for(whole: Path, tmp_path: Path, zipped: bool) -> None:
    tensors = load_file(whole / "model.safetensors")
    (tmp_path / "config.json").write_text((whole / "config.json").read_text())
    torch.save(tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    loaded = load_model(tmp_path, block_size=16, device="cpu", path="generate", allow_pickled_weights=True)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")  # the model does not depend on the file any more
    stored = sorted(float(t.double().sum()) for t in tensors.values())
    found = sorted(float(p.double().sum()) for p in loaded._model.parameters())  # type: ignore[union-attr]
    assert found == stored


def _edit(folder: Path, tie: tuple[bool | None, bool | None], head: str) -> None:
    """Set the tie flags (outer, text) and take the head away, or leave it."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for owner, flag in ((config, tie[0]), (config["text_config"], tie[1])):
        owner.pop("tie_word_embeddings", None)
        if flag is not None:
            owner["tie_word_embeddings"] = flag
    path.write_text(json.dumps(config))
    if head == "absent":
        tensors = load_file(folder / "model.safetensors")
        tensors.pop("language_model.lm_head.weight")
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("text", [True, False])
@pytest.mark.parametrize("head", ["differs", "absent"])
def test_ties_are_transformers_own(whole: Path, tmp_path: Path, outer: bool, text: bool, head: str) -> None:
    """The same head as plain transformers; none at all is an error, where it would make one up."""
    folder = rewrite(whole, tmp_path / "tied", lambda name: name)
    _edit(folder, (outer, text), head)
    plain, info = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    if info["missing_keys"]:
        with pytest.raises(WeightsError, match=r"missing: lm_head\.weight"):
            load_model(folder, block_size=16, device="cpu")
        return
    model = load_model(folder, block_size=16, device="cpu")
    prompt = make_prompt(FAMILY, [9])
    ours = run_packed(model, [prompt], PackedRun(new_tokens=1))[0].logprobs[0]
    with torch.inference_mode():
        theirs = plain(input_ids=torch.tensor([prompt.token_ids])).logits[0, -1].log_softmax(-1)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_a_head_that_is_tied_is_as_wide_as_the_table(tmp_path: Path) -> None:
    """Ovis 2 makes its head by a number of its own, and then ties it: what transformers runs, we run."""
    folder = build(FAMILIES["ovis2"], tmp_path)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "vocab_size": 5000}))
    model = load_model(folder, block_size=16, device="cpu")
    assert (model.describe()["path"], model.vocab_size) == ("paged", VOCAB)


def test_nothing_is_left_on_meta_and_nothing_is_made_up(whole: Path) -> None:
    """Every tensor of the file is in the model, bit for bit."""
    model = load_model(whole, block_size=16, device="cpu", path="generate")._model  # type: ignore[union-attr]
    named: Mapping[str, torch.Tensor] = dict(model.named_parameters())
    assert not any(tensor.is_meta for tensor in (*named.values(), *model.buffers()))
    stored = sorted(float(t.double().sum()) for t in load_file(whole / "model.safetensors").values())
    assert sorted(float(t.double().sum()) for t in named.values()) == pytest.approx(stored, abs=0)


@pytest.mark.parametrize(
    ("stored", "asked", "expected", "reason"),
    [
        (torch.float32, "auto", "float32", "the checkpoint's own"),
        (torch.bfloat16, "auto", "bfloat16", "the checkpoint's own"),
        (torch.float16, "auto", "bfloat16", "float16, which a CPU computes several times slower"),
        (torch.bfloat16, "float32", "float32", "as asked"),
        (torch.float32, torch.bfloat16, "bfloat16", "as asked"),
    ],
)
def test_dtype(
    whole: Path, tmp_path: Path, stored: torch.dtype, asked: str | torch.dtype, expected: str, reason: str
) -> None:
    folder = rewrite(whole, tmp_path / "typed", lambda name: name)
    tensors = {name: t.to(stored) for name, t in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model = load_model(folder, block_size=16, device="cpu", dtype=asked)
    about = model.describe()
    assert about["dtype"] == expected
    assert reason in str(about["dtype_reason"])
    assert model.cache_spec().dtype == getattr(torch, expected)
