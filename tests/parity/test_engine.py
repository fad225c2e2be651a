"""The whole engine on real architectures: `generate()`'s tokens from full batches, tiny caches, hits and chunks."""

from __future__ import annotations

from pathlib import Path

import pytest

from fixtures.tiny_models.conformance import TOLERANCE, Case
from fixtures.tiny_models.families import FAMILIES
from mmserve.config import EngineConfig
from mmserve.engine.core import Engine
from mmserve.testing import ByteTokenizer
from mmserve.types import SamplingParams

NEW_TOKENS = 10
BLOCK_SIZE = 16


class Numbers(ByteTokenizer):
    """Says ids as numbers: what a tiny model says is not text."""

    def decode(self, token_ids, skip_special_tokens=False):  # type: ignore[no-untyped-def]
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return "".join(f" {token_id}" for token_id in ids)

    def convert_ids_to_tokens(self, ids):  # type: ignore[no-untyped-def]
        return str(ids)


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
                # generate() may say a placeholder's id, which is never sampled here: equal up to there.
                forbidden = [i for i, token in enumerate(answer.token_ids) if token in case.model.forbidden_token_ids]
                count = min(forbidden, default=NEW_TOKENS)
                assert list(output.token_ids[:count]) == list(answer.token_ids[:count])
                assert output.logprobs is not None
                for entry, logprobs in zip(output.logprobs[:count], answer.logprobs, strict=False):
                    assert abs(entry.chosen.logprob - float(logprobs[entry.chosen.token_id])) < TOLERANCE
        assert engine.stats()["prefix_hit_rate"] > 0
        engine.check_integrity()
    finally:
        engine.close()
