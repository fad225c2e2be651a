"""`bench parallel` in small: bytes as counted on paper, every step exchanged, both sides measured."""

from __future__ import annotations

import json

from click.testing import CliRunner

from mmserve.cli.main import main
from mmserve.demo import demo_model_folder


def test_it_ends_in_one_line_and_bytes_are_those_on_paper() -> None:
    arguments = ["bench", "parallel", "--model", str(demo_model_folder()), "--dtype", "float32"]
    small = ["--sequences", "2", "--text-tokens", "20", "--repeats", "1"]
    done = CliRunner().invoke(main, [*arguments, *small], catch_exceptions=False)
    assert done.exit_code == 0
    result = json.loads(done.stdout.splitlines()[-1])
    assert set(result) == {"machine", "model", "dtype", "workload", "exchange", "traffic", "prefill"}
    exchanged = result["exchange"]
    assert (exchanged["num_seqs"], exchanged["steps"]) == (2, 200)
    assert 0 < exchanged["send_ms"] <= exchanged["median_ms"] <= exchanged["p90_ms"]
    for entry, layout in zip(result["traffic"], ((2, 1), (1, 2)), strict=True):
        assert (entry["tensor_parallel"], entry["pipeline_parallel"]) == layout
        assert entry["bytes_per_token"] == entry["bytes_per_token_on_paper"] > 0
        assert entry["bytes_per_answer"] == entry["bytes_per_answer_on_paper"]
    prefill = result["prefill"]
    assert prefill["ratio"] == prefill["ranks"] / prefill["one_process"] > 0
