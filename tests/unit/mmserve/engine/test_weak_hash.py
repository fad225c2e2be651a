"""The whole engine with a hash made weak on purpose: hits are lost, no answer is another's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mmserve.cache.prefix_index import PrefixIndex
from mmserve.config import EngineConfig
from mmserve.engine import core
from mmserve.testing import ByteTokenizer, MockModel, mock_image, mock_prompt
from mmserve.types import SamplingParams

WAIT = 300
"""Seconds after which a test gives up."""

PROMPTS = [mock_prompt([65 + i % 3] * (13 + i), [mock_image(2, 6, i % 4)]) for i in range(20)]


def answers(**options: Any) -> list[tuple[int, ...]]:
    """Everything is asked twice; the second time the cache is warm."""
    config = EngineConfig(**{"block_size": 4, "num_blocks": 60, "max_num_batched_tokens": 16} | options)
    engine = core.Engine(MockModel(), ByteTokenizer(), config, identity="mock")
    given = []
    for _ in range(2):
        handles = [engine.submit(prompt, SamplingParams(max_tokens=8)) for prompt in PROMPTS]
        given += [handle.result(WAIT).token_ids for handle in handles]
    engine.close()
    engine.check_integrity()
    return given


@pytest.mark.parametrize("weak", [lambda _: b"", lambda payload: bytes([sum(payload) % 3])])
def test_answers_are_their_own_whatever_the_hash(
    weak: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(enable_prefix_caching=False, num_blocks=400)
    monkeypatch.setattr(core, "PrefixIndex", lambda *args, **more: PrefixIndex(*args, digest=weak, **more))
    assert answers() == expected
