"""The packed model at its edges: ids outside the table, typed image tokens, rows that are wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures.tiny_models.families import FAMILIES
from fixtures.tiny_models.family import build, make_prompt
from fixtures.tiny_models.shrink import IMAGE, VOCAB
from mmserve.cache.tensors import allocate
from mmserve.conformance.packed import PackedRun, run_packed
from mmserve.errors import ConfigError, EngineError, InputError, ModelOutputError
from mmserve.kernels.library import status
from mmserve.model import load_model
from mmserve.model.interface import ImageRows
from mmserve.model.paged import PagedModel
from processors.types import ImageItem, PlaceholderRange, ProcessedPrompt

FAMILY = FAMILIES["qwen3_vl"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PagedModel:
    loaded = load_model(build(FAMILY, tmp_path_factory.mktemp("model")), block_size=16, device="cpu")
    assert isinstance(loaded, PagedModel)
    return loaded


def first_logprobs(model: PagedModel, *prompts: ProcessedPrompt) -> list[torch.Tensor]:
    return [answer.logprobs[0] for answer in run_packed(model, prompts, PackedRun(new_tokens=1, chunk=5))]


def with_ids(prompt: ProcessedPrompt, change: dict[int, int]) -> ProcessedPrompt:
    return replace(prompt, token_ids=tuple(change.get(i, t) for i, t in enumerate(prompt.token_ids)))


def test_the_id_at_an_image_position_is_never_looked_up(model: PagedModel) -> None:
    """Whatever stands there, even beyond the table, the logits are the same."""
    prompt = make_prompt(FAMILY, [3, (1, 0), 4])
    places = prompt.images[0].range.embed_positions()
    others = [with_ids(prompt, dict.fromkeys(places, token)) for token in (5, VOCAB, VOCAB + 1000, -1)]
    expected, *found = first_logprobs(model, prompt, *others)
    for logprobs in found:
        assert torch.equal(logprobs, expected)


@pytest.mark.parametrize("token", [VOCAB, VOCAB + 7, -1])
def test_an_id_outside_the_table_outside_an_image_is_refused(model: PagedModel, token: int) -> None:
    prompt = with_ids(make_prompt(FAMILY, [3, (1, 0), 4]), {1: token})
    with pytest.raises(InputError, match=f"token {token} at index 1 is not in the model's table of {VOCAB}"):
        model.plan(prompt)


def test_a_typed_image_token_takes_no_row(model: PagedModel) -> None:
    """In user text it is one more token: an image before or after it keeps its rows, and positions count on."""
    prompt = make_prompt(FAMILY, [3, (1, 0), 4])
    typed = with_ids(prompt, {1: IMAGE, len(prompt.token_ids) - 2: IMAGE})
    assert torch.equal(model.plan(typed).positions, model.plan(prompt).positions)
    plain, with_token = first_logprobs(model, prompt, typed)
    assert not torch.allclose(plain, with_token)
    alone = first_logprobs(model, typed)[0]
    torch.testing.assert_close(with_token, alone, atol=1e-4, rtol=0)


def test_mrope_positions_and_delta(model: PagedModel) -> None:
    """Three tokens, an image of 2x4 rows, two tokens: the text goes on after the image's longer side."""
    plan = model.plan(make_prompt(FAMILY, [3, (1, 1), 2]))
    expected = [
        [0, 1, 2, *[3] * 8, 7, 8],
        [0, 1, 2, 3, 3, 3, 3, 4, 4, 4, 4, 7, 8],
        [0, 1, 2, 3, 4, 5, 6, 3, 4, 5, 6, 7, 8],
    ]
    assert plan.positions.tolist() == expected
    assert plan.delta == 9 - 13
    assert plan.positions_at(12, 15).tolist() == [[8, 9, 10]] * 3


def test_placeholders_are_forbidden(model: PagedModel) -> None:
    assert IMAGE in model.forbidden_token_ids
    assert all(0 <= token < model.vocab_size for token in model.forbidden_token_ids)


def item(rows: int = 4, **changes: torch.Tensor) -> ImageItem:
    image = make_prompt(FAMILY, [(1, 0)]).images[0]
    return ImageItem("k", PlaceholderRange(0, rows), {**image.tensors, **changes}, (32, 32))


def test_each_image_fails_alone(model: PagedModel) -> None:
    good = item()
    nan = item(pixel_values=torch.full_like(good.tensors["pixel_values"], float("nan")))
    wrong_shape = item(pixel_values=good.tensors["pixel_values"][:, :-1])
    surprise = item(pixel_valuse=torch.zeros(1))
    results = model.encode([good, item(rows=5), nan, wrong_shape, surprise, good])
    first, *failures, last = results
    assert isinstance(first, ImageRows)
    assert isinstance(last, ImageRows)
    assert torch.equal(first.rows, last.rows)
    messages = [
        "made 4 rows for an image whose range takes 5",
        "not finite in torch.float32",
        "the vision tower failed on an image of",
        "no image tensors called pixel_valuse",
    ]
    for failure, message in zip(failures, messages, strict=True):
        assert isinstance(failure, (ModelOutputError, InputError))
        assert message in str(failure)


def test_rows_own_their_storage(model: PagedModel) -> None:
    """A view would keep a whole batch of features alive in the image cache."""
    (rows,) = model.encode([item()])
    assert isinstance(rows, ImageRows)
    for tensor in (rows.rows, *rows.extra.values()):
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    assert rows.extra["deepstack"].shape == (2, 4, 64)
    assert rows.nbytes() == 3 * 4 * 64 * 4


def test_the_head_sees_only_the_positions_that_are_sampled(model: PagedModel) -> None:
    """Two prompts of 16 and 9 tokens in chunks of 5: rows go through the head only where a prompt ends."""
    seen: list[int] = []
    head = model._model.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _, args: seen.append(args[0].reshape(-1, args[0].shape[-1]).shape[0]))
    prompts = [make_prompt(FAMILY, [5, (1, 0), 7]), make_prompt(FAMILY, [9], seed=1)]
    assert [len(prompt.token_ids) for prompt in prompts] == [16, 9]
    try:
        run_packed(model, prompts, PackedRun(new_tokens=1, chunk=5))
    finally:
        hook.remove()
    assert seen == [0, 1, 0, 1]


@pytest.mark.parametrize("replace_layers", [True, False])
def test_what_is_replaced_is_logged_as_it_is_described(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, replace_layers: bool
) -> None:
    with caplog.at_level("INFO", "mmserve.model"):
        loaded = load_model(build(FAMILY, tmp_path), block_size=16, device="cpu", replace=replace_layers)
    described: Any = loaded.describe()["replacements"]
    assert described
    for entry, record in zip(described, caplog.records, strict=True):
        message = record.getMessage()
        assert message.startswith(f"replaced {entry['count']}: {entry['what']}")
        assert entry["declined"] is None or entry["declined"] in message


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_which_kernels_run_is_described(tmp_path: Path, backend: str) -> None:
    about = load_model(build(FAMILY, tmp_path), block_size=16, device="cpu", attention_backend=backend).describe()
    native = backend == "auto" and status().native
    assert about["kernels"] == (status().describe() if native else None)
    declined = str(about["attention"][0]["declined"])
    assert native or backend == "reference" or f"native: the kernels are not compiled: {status().reason}" in declined


def test_bind_cache_counts(model: PagedModel) -> None:
    spec = model.cache_spec()
    caches = allocate(spec.layers[:-1], num_blocks=2, block_size=16, dtype=spec.dtype)
    with pytest.raises(EngineError, match="2 caches were given to a model that keeps 3"):
        model.bind_cache(caches)


def test_cache_shapes(model: PagedModel) -> None:
    spec = model.cache_spec()
    caches = allocate(spec.layers, num_blocks=3, block_size=8, dtype=torch.bfloat16)
    assert [cache.key.shape for cache in caches] == [(3, 8, 2, 16)] * 3
    assert all(cache.key.dtype == torch.bfloat16 and not cache.key.any() for cache in caches)
    assert spec.bytes_per_token() == 3 * 2 * 2 * 16 * 4
    for blocks, size in ((0, 8), (3, 0)):
        with pytest.raises(ConfigError, match="at least one block of one token"):
            allocate(spec.layers, num_blocks=blocks, block_size=size, dtype=spec.dtype)


def test_images_to_a_text_model(tmp_path: Path) -> None:
    text = load_model(build(FAMILIES["llama"], Path(tmp_path)), block_size=16, device="cpu")
    with pytest.raises(InputError, match="this model takes no images"):
        text.plan(make_prompt(FAMILY, [3, (1, 0)]))
