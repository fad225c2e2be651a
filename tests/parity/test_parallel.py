"""Over several ranks a request's tokens are those of one process: dense, experts, DeepStack, tied, odd sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fixtures.tiny_models.conformance import TOLERANCE, Case
from fixtures.tiny_models.families import FAMILIES
from fixtures.tiny_models.family import TinyFamily, build, make_prompt
from fixtures.tiny_models.id_tokenizer import Numbers
from fixtures.tiny_models.ranks import BLOCK_SIZE, parallel_engine, workers
from mmserve.config import EngineConfig
from mmserve.engine.core import Engine
from mmserve.kernels.library import status
from mmserve.model import load_model
from mmserve.parallel.layout import Layout
from mmserve.parallel.workers.crew import Member
from mmserve.types import GenerationOutput, SamplingParams
from processors.types import ProcessedPrompt

NEW_TOKENS = 8
ODD = {"vocab_size": 301, "intermediate_size": 47}
TENSOR = {
    "llama": {},
    "llama-odd": ODD,  # neither the vocabulary nor the inner width divides
    "llama-nine-heads": {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3},
    "llama-one-kv-head": {"num_key_value_heads": 1},
    "gemma2": {},  # tied, scaled embedding, capped logits
    "phi3": {},  # fused in the checkpoint and in the model: gathered output, whole input
    "smolvlm": {},
    "qwen2_vl": {},  # biases, M-RoPE
    "gemma3": {},  # tied, norms on heads, both ways in images
    "qwen3_vl_moe": {},  # experts, DeepStack
    "aria": {},  # experts packed along the last dimension
    "kimi_k25": {},  # latent attention, shared experts
    "muse_glimmer": {},  # a plan for the tower too
    "gemma4": {},  # embeddings for every layer, shared caches
    "granite4_vision": {},  # image rows before layers of given numbers
    "qwen3_5": {},  # through generate(), with recurrent layers
}
PIPELINE = {
    "gemma2": {},  # tied: the table on both ends
    "llama-odd": ODD,
    "qwen2_vl": {},
    "qwen3_vl": {},  # DeepStack rows go on to the second stage
    "muse_glimmer": {},
    "gemma3": {},  # windows, over groups of blocks that stages agree on
    # Image rows before layers of given numbers, on both stages.
    "granite4_vision": {"": {"deepstack_layer_map": [[-1, 0], [-2, 3]], "downsample_rate": "1/2"}},
}
BOTH = {"llama-one-kv-head": {"num_key_value_heads": 1}, "qwen3_vl_moe": {}, "gemma3": {}}
CASES = [
    *((Layout(2, 1), name, more) for name, more in TENSOR.items()),
    *((Layout(1, 2), name, more) for name, more in PIPELINE.items()),
    *((Layout(2, 2), name, more) for name, more in BOTH.items()),
]


@pytest.fixture(scope="module")
def members() -> Iterator[list[Member]]:
    with workers(3) as started:
        yield started


def family(name: str, more: dict[str, Any]) -> TinyFamily:
    plain = FAMILIES[name.partition("-")[0]]
    return replace(plain, config={**plain.config, **more})


def ask(engine: Engine, prompts: list[ProcessedPrompt], **sampling: Any) -> list[GenerationOutput]:
    params = [SamplingParams(max_tokens=NEW_TOKENS, logprobs=0, **sampling) for _ in prompts]
    handles = [engine.submit(prompt, param) for prompt, param in zip(prompts, params, strict=True)]
    return [handle.result(600) for handle in handles]


def assert_same(found: list[GenerationOutput], expected: list[GenerationOutput]) -> None:
    for answer, wanted in zip(found, expected, strict=True):
        assert answer.token_ids == wanted.token_ids
        assert answer.logprobs is not None
        assert wanted.logprobs is not None
        for entry, other in zip(answer.logprobs, wanted.logprobs, strict=True):
            assert abs(entry.chosen.logprob - other.chosen.logprob) < TOLERANCE


def assert_native(model: Any, workers: list[dict[str, Any]]) -> None:
    """Every rank runs its part of each layer in two native calls, one layer after the other."""
    for about in (model.describe(), *workers):
        counts = {entry["what"]: entry["count"] for entry in about["replacements"]}
        assert counts["decoder layers as two native calls, a sum after each"] == 2
        assert counts["all decoder layers in one call"] == 1


@pytest.mark.parametrize(
    ("layout", "name", "more"), CASES, ids=[f"{name}-{where.tensor}x{where.pipeline}" for where, name, _ in CASES]
)
def test_ranks_together_answer_as_one(
    layout: Layout, name: str, more: dict[str, Any], members: list[Member], tmp_path: Path
) -> None:
    """All prompts at once, in chunks; again with hot caches; in less memory a rank."""
    case = Case(family(name, more), tmp_path)
    options = {"num_blocks": 32, "max_num_batched_tokens": 7, "max_num_seqs": 3}
    engine = Engine(case.model, Numbers(), EngineConfig(block_size=BLOCK_SIZE, **options), identity=name)
    expected = ask(engine, case.prompts)
    groups = engine.limits.groups
    engine.close()
    with parallel_engine(tmp_path, layout, members, **options) as (engine, model):
        assert engine.limits.groups == groups
        assert_same(ask(engine, case.prompts), expected)
        assert_same(ask(engine, case.prompts), expected)
        engine.check_integrity()
        whole, own = case.model.describe()["parameters"], model.describe()["parameters"]
        others = [worker["parameters"] for worker in engine.describe()["workers"]]
        assert len(others) == layout.size - 1
        assert all(parameters < whole for parameters in (own, *others))
        if name.startswith("llama") and layout.pipeline == 1 and status().native:
            assert_native(model, engine.describe()["workers"])


def test_stages_go_by_the_same_windows(members: list[Member], tmp_path: Path) -> None:
    """Layers of every kind on both stages; what has left the window is given back, or the prompt would not fit."""
    family = FAMILIES["gemma2"]
    kinds = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 2
    config = {**family.config, "num_hidden_layers": 8, "layer_types": kinds, "sliding_window": BLOCK_SIZE}
    build(family := replace(family, config=config), tmp_path)
    prompt, params = make_prompt(family, [100]), SamplingParams(max_tokens=6)
    options = {"block_size": BLOCK_SIZE, "max_num_batched_tokens": 16, "enable_prefix_caching": False}
    engine = Engine(
        load_model(tmp_path, dtype="float32", device="cpu", block_size=BLOCK_SIZE),
        Numbers(),
        EngineConfig(num_blocks=32, **options),
        identity="alone",
    )
    expected, groups = engine.submit(prompt, params).result(600).token_ids, engine.limits.groups
    engine.close()
    assert len(groups) == 4
    del options["block_size"]
    with parallel_engine(tmp_path, Layout(1, 2), members, num_blocks=5, **options) as (engine, model):
        assert engine.limits.groups == groups
        assert 0 < len(model.cache_spec().layers) < 8
        assert model.cache_spec().layout().num_slots < 8 // 2
        assert engine.submit(prompt, params).result(600).token_ids == expected
        engine.check_integrity()
