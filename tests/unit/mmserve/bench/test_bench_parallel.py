"""`bench parallel` in small: bytes as counted on paper, every step exchanged, both sides measured."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from mmserve.bench import parallel
from mmserve.bench.parallel import Workload
from mmserve.cli.main import main
from mmserve.demo import demo_model_folder


class Side:
    """Stands for a process that works when it is told to: each is an import of everything."""

    def __init__(self, model: Path, dtype: str, work: Workload, ranks: int, threads: int) -> None:
        self.rate = 100.0 * ranks + 20.0 * (threads - 1)

    def turn(self, what: str, amount: int) -> float:
        return self.rate * amount

    def close(self) -> None:
        pass


def test_a_side_answers_each_turn_with_its_tokens_or_pictures_a_second(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("prefill 1\nencoding 2\nprefill 2\n"))
    assert parallel._main([str(demo_model_folder()), "float32", "1", "20"]) == 0
    turns = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(turns) == 3
    assert min(turns) > 0


def test_it_ends_in_one_line_and_bytes_are_those_on_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "_Side", Side)
    arguments = ["bench", "parallel", "--model", str(demo_model_folder()), "--dtype", "float32"]
    small = ["--sequences", "2", "--text-tokens", "20", "--repeats", "1"]
    done = CliRunner().invoke(main, [*arguments, *small], catch_exceptions=False)
    assert done.exit_code == 0
    result = json.loads(done.stdout.splitlines()[-1])
    assert set(result) == {"machine", "model", "dtype", "workload", "exchange", "traffic", "prefill", "encoding"}
    exchanged = result["exchange"]
    assert (exchanged["num_seqs"], exchanged["steps"]) == (2, 200)
    assert 0 < exchanged["send_ms"] <= exchanged["median_ms"] <= exchanged["p90_ms"]
    for entry, layout in zip(result["traffic"], ((2, 1), (1, 2)), strict=True):
        assert (entry["tensor_parallel"], entry["pipeline_parallel"]) == layout
        assert entry["bytes_per_token"] == entry["bytes_per_token_on_paper"] > 0
        assert entry["bytes_per_answer"] == entry["bytes_per_answer_on_paper"]
    prefill, encoding = result["prefill"], result["encoding"]
    assert prefill == {
        "ranks": 400.0, "one_process": 240.0, "one_thread": 200.0, "ratio": 400 / 240, "over_one_thread": 2.0
    }  # fmt: skip
    assert encoding["ranks"] == 8 * 200.0
    assert "encoding, pictures/s" in done.stdout
