"""`mmserve bench processors`: figures that fit together."""

from __future__ import annotations

import pytest

from mmserve.bench.processors import render, run
from mmserve.demo import demo_model_folder


def test_figures_follow_from_the_seconds() -> None:
    result = run(demo_model_folder(), num_images=2, size=(64, 48), repeats=1)
    seconds = result["seconds"]
    assert all(value > 0 for value in seconds.values())
    assert result["overhead"] == pytest.approx(seconds["layer"] / seconds["bare"] - 1)
    beside = seconds["one prompt, side by side"]
    assert result["speedup"] == pytest.approx(seconds["one prompt, one by one"] / beside)
    assert result["speedup_over_one_thread"] == pytest.approx(seconds["one prompt, one thread"] / beside)
    assert result["repeat_ms"] == pytest.approx(500 * seconds["seen before"])
    assert result["repeat_ms_beyond_hash"] < result["repeat_ms"]
    assert result["tokens"] > 0
    assert all(name in render(result) for name in seconds)
