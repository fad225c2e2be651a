"""The repository's own golden fixtures, checked the way a user checks theirs."""

from __future__ import annotations

from pathlib import Path

from mmserve.testing import golden_test

test_golden = golden_test(Path(__file__).parents[2] / "fixtures" / "golden", dtype="float32")
