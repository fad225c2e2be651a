"""`mmserve bench memory`: what a pipeline adds to a process, and what it can not measure."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mmserve.bench.apart import MiB
from mmserve.bench.memory import Workload, render, run
from mmserve.demo import demo_model_folder
from mmserve.errors import MMServeError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")


def test_the_peak_holds_at_least_the_weights() -> None:
    result = run(demo_model_folder(), workload=Workload(requests=2, tokens=4, cache=16 * MiB))
    assert result["weights"] == pytest.approx(7797504 / MiB)
    assert result["cache"] == 16
    assert result["weights"] < result["peak"]
    assert result["loaded"] <= result["peak"]
    assert result["ratio"] == pytest.approx(result["peak"] / (result["weights"] + result["cache"]))
    assert "peak over weights and cache" in render(result)


def test_what_can_not_be_asked_is_said(tmp_path: Path) -> None:
    with pytest.raises(MMServeError, match=r"could not be asked: '.*' holds no config\.json"):
        run(tmp_path)
