"""A request's tokens do not depend on who shares its batch, nor on the chunk size: they are `generate()`'s.

One family of each kind, in every arrangement; tests/parity/test_family_parity.py takes them all, in one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fixtures.tiny_models.conformance import Case
from fixtures.tiny_models.families import FAMILIES
from mmserve.conformance.packed import PackedRun, run_packed

KINDS = {
    "smolvlm": "tiles with tokens between them",
    "qwen2_vl": "M-RoPE",
    "qwen3_vl": "M-RoPE and DeepStack rows",
    "gemma3": "both ways in each image, windows that cut it",
    "paligemma": "both ways in the whole prompt",
    "muse_glimmer": "windows and a final soft cap",
    "mllama": "cross attention: through generate()",
    "qwen3_5": "recurrent state: through generate()",
}


@pytest.fixture(scope="module", params=sorted(KINDS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(FAMILIES[request.param], Path(tmp_path_factory.mktemp(request.param)))


@pytest.mark.parametrize(
    ("chunk", "stagger"), [(10**9, 0), (5, 0), (3, 2)], ids=["whole", "chunks-inside-images", "prefill-meets-decode"]
)
def test_packed_equals_generate(case: Case, chunk: int, stagger: int) -> None:
    case.compare(new_tokens=8, chunk=chunk, stagger=stagger)


def test_the_path_under_test_ran(case: Case) -> None:
    expected = "generate" if "generate()" in KINDS[case.family.name] else "paged"
    assert case.model.describe()["path"] == expected


def test_the_image_counts(case: Case) -> None:
    """Another image in the same place changes the logits; the same image again does not."""
    first, second, again = (
        run_packed(case.model, [case.prompt([3, (seed, 0), 5])], PackedRun(new_tokens=1))[0].logprobs[0]
        for seed in (1, 2, 1)
    )
    assert (first - second).abs().max() > 1e-2
    assert torch.equal(first, again)
