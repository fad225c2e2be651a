"""`bench offline` in small: what it returns and what the command prints."""

from __future__ import annotations

import json

from click.testing import CliRunner

from mmserve.cli.main import main


def test_it_ends_in_one_line_that_names_machine_model_and_workload() -> None:
    arguments = ["bench", "offline", "--tokens", "2", "--at-once", "1", "--at-once", "2", "--repeats", "1"]
    done = CliRunner().invoke(main, [*arguments, "--device", "cpu"], catch_exceptions=False)
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0].split()[:2] == ["requests/s", "first"]
    result = json.loads(lines[-1])
    assert set(result) == {"machine", "model", "dtype", "workload", "cases"}
    assert result["workload"]["at_once"] == [1, 2]
    assert [(case["at_once"], case["cache"]) for case in result["cases"]] == [
        (1, "cold"),
        (1, "warm"),
        (2, "cold"),
        (2, "warm"),
    ]
    for case in result["cases"]:
        assert case["requests_per_second"] > 0
        assert 0 < case["first_token_s"] <= case["first_token_worst_s"]
        assert (case["cached_tokens"] > 0.5) == (case["cache"] == "warm")
