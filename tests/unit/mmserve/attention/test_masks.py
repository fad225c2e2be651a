"""The mask rule against the drawing in its docstring and against plain loops."""

from __future__ import annotations

import pytest
import torch
from oracle import make_case, sees, spec_of

from mmserve.attention.masks import sequence_mask, visible


def test_the_drawing() -> None:
    rows = ["x", "xx", "xxxxxx", " xxxxx", "  xxxx", "  xxxx", "    xxx"]
    drawn = torch.tensor([[c == "x" for c in row.ljust(7)] for row in rows])
    positions = torch.arange(7)
    spec = spec_of(1, 1, 4, window=3)
    assert torch.equal(visible(positions, positions, spec, [(2, 6)]), drawn)
    drawn[5, 2] = False
    cut = spec_of(1, 1, 4, window=3, window_cuts_spans=True)
    assert torch.equal(visible(positions, positions, cut, [(2, 6)]), drawn)


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("cuts", [False, True])
def test_equals_loops(window: int | None, chunk: int | None, cuts: bool) -> None:
    spec = spec_of(1, 1, 4, window=window, chunk=chunk, window_cuts_spans=cuts)
    spans = ((3, 9), (9, 10), (12, 15))
    case = make_case(spec, [(2, 16)], spans=[spans])
    mask = sequence_mask(case.metadata, 0, spec, torch.device("cpu"))
    expected = [[sees(q, k, spec, spans) for k in range(18)] for q in range(2, 18)]
    assert mask.tolist() == expected
