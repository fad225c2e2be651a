"""Calling the text model and the head by themselves: only where it gives the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import CohereConfig, CohereForCausalLM, LlamaConfig, LlamaForCausalLM

from mmserve.kernels.library import status
from mmserve.model.load import load_model
from mmserve.model.paged import PagedModel

TEXT = {
    "vocab_size": 60, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip


def save(folder: Any, model: Any) -> Any:
    torch.manual_seed(0)
    model.eval().save_pretrained(folder)
    return folder


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**TEXT))


def cohere() -> CohereForCausalLM:
    return CohereForCausalLM(CohereConfig(**TEXT, logit_scale=0.3, use_qk_norm=False))


@pytest.mark.skipif(not status().native, reason="nothing is replaced without compiled kernels")
@pytest.mark.parametrize(
    ("make", "forward"),
    [(llama, "text model and head, which"), (cohere, "the whole model: it does more than call its text model")],
    ids=["plain", "scaled-logits"],
)
def test_the_shortcut_is_taken_only_where_it_changes_nothing(
    make: Callable[[], Any], forward: str, tmp_path: Any
) -> None:
    model = load_model(save(tmp_path, make()), dtype="float32", path="paged", block_size=16)
    assert str(model.describe()["forward"]).startswith(forward)


def test_with_replacement_switched_off_the_whole_model_runs(tmp_path: Any) -> None:
    model = load_model(save(tmp_path, llama()), dtype="float32", path="paged", block_size=16, replace=False)
    assert model.describe()["forward"] == "the whole model"


@pytest.mark.skipif(not status().native, reason="nothing is replaced without compiled kernels")
def test_the_trial_text_runs_once_through_each_of_the_two(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    own = PagedModel.forward
    monkeypatch.setattr(PagedModel, "forward", lambda model, batch: calls.append(batch) or own(model, batch))
    load_model(save(tmp_path, llama()), dtype="float32", path="paged", block_size=16)
    assert len(calls) == 4  # two batches, by the whole model and by its text model and head
