"""The whole engine on real architectures: `generate()`'s tokens from full batches, tiny caches, hits and chunks."""

from __future__ import annotations

from pathlib import Path

import pytest

from fixtures.tiny_models.conformance import Case
from fixtures.tiny_models.families import FAMILIES
from fixtures.tiny_models.id_tokenizer import Numbers
from mmserve.config import EngineConfig
from mmserve.engine.core import Engine
from mmserve.types import SamplingParams

NEW_TOKENS = 10
BLOCK_SIZE = 16


@pytest.mark.parametrize("name", ["gemma3", "qwen2_vl", "qwen3_vl", "idefics3"])
def test_cold_and_hot_together_as_each_alone(name: str, tmp_path: Path) -> None:
    """Every prompt three times: together, together again with a hot cache, in chunks that cut causal images."""
    case = Case(FAMILIES[name], tmp_path)
    expected = case.expected(NEW_TOKENS)
    longest = max(len(prompt.token_ids) for prompt in case.prompts) + NEW_TOKENS
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        # A block holds one cache group's layers, and gemma3's layers with a window are a group of their own.
        num_blocks=(-(-longest // BLOCK_SIZE) + 3) * (2 if name == "gemma3" else 1),
        max_num_batched_tokens=7,
        max_num_seqs=3,
        encoder_cache_memory=1,
    )
    sampling = SamplingParams(max_tokens=NEW_TOKENS, logprobs=0)
    engine = Engine(case.model, Numbers(), config, identity=name)
    try:
        for _ in range(2):
            handles = [engine.submit(prompt, sampling) for prompt in case.prompts]
            for handle, answer in zip(handles, expected, strict=True):
                output = handle.result(600)
                case.assert_as_generate(output, answer)
        assert engine.stats()["prefix_hit_rate"] > 0
        engine.check_integrity()
    finally:
        engine.close()
