"""Layers with a sliding window keep only their window, and the answers stay those of `generate()`."""

from __future__ import annotations

from pathlib import Path

import pytest

from fixtures.tiny_models.conformance import Case
from fixtures.tiny_models.families import FAMILIES
from fixtures.tiny_models.id_tokenizer import Numbers
from mmserve.config import EngineConfig
from mmserve.engine.core import Engine
from mmserve.types import SamplingParams

NEW_TOKENS = 16
BLOCK_SIZE = 4
WINDOW = 6


@pytest.mark.parametrize(
    ("name", "windows"),
    [("gemma3", [None, WINDOW]), ("gemma2", [None, WINDOW]), ("cohere2", [None, WINDOW]), ("mistral", [WINDOW])],
)
def test_cold_and_hot_in_a_small_cache(name: str, windows: list[int | None], tmp_path: Path) -> None:
    case = Case(FAMILIES[name], tmp_path)
    expected = case.expected(NEW_TOKENS)
    longest = max(len(prompt.token_ids) for prompt in case.prompts) + NEW_TOKENS
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=-(-longest // BLOCK_SIZE) + 3,  # of all layers: less than two requests that give nothing back
        max_num_batched_tokens=5,
        max_num_seqs=2,
    )
    engine = Engine(case.model, Numbers(), config, identity=name)
    try:
        assert [group.window for group in engine.limits.groups] == windows
        for _ in range(2):
            handles = [
                engine.submit(prompt, SamplingParams(max_tokens=NEW_TOKENS, logprobs=0)) for prompt in case.prompts
            ]
            for handle, answer in zip(handles, expected, strict=True):
                output = handle.result(600)
                case.assert_as_generate(output, answer)
        longest_prompt = max(case.prompts, key=lambda prompt: len(prompt.token_ids))
        again = [engine.submit(longest_prompt, SamplingParams(max_tokens=4)).result(600) for _ in range(2)]
        assert again[0].token_ids == again[1].token_ids
        assert again[1].usage.cached_tokens > 0
        assert engine.stats()["blocks_held"] == 0
        engine.check_integrity()
    finally:
        engine.close()
