"""The reference backend against dense float64 loops: every rule, prefill, chunks and decode in one batch."""

from __future__ import annotations

import random

import pytest
import torch
from oracle import Case, make_case, spec_of

from mmserve.attention.interface import AttentionSpec
from mmserve.attention.reference import ReferenceBackend

MIXED = [(0, 7), (5, 1), (3, 6), (0, 1), (11, 1), (8, 4)]
"""A whole prompt, decodes, chunks over a prefix, a prompt of one token."""


def attend(case: Case) -> torch.Tensor:
    return ReferenceBackend().attend(case.query, case.key, case.value, case.cache, case.spec, case.metadata)


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(spec_of(4, 4, 8), id="plain"),
        pytest.param(spec_of(6, 2, 16), id="grouped"),
        pytest.param(spec_of(4, 1, 8), id="one-kv-head"),
        pytest.param(spec_of(4, 2, 8, value_size=12), id="wider-values"),
        pytest.param(spec_of(4, 2, 8, scale=0.9), id="own-scale"),
        pytest.param(spec_of(4, 2, 8, window=3), id="window"),
        pytest.param(spec_of(4, 2, 8, window=1), id="window-of-itself"),
        pytest.param(spec_of(4, 2, 8, window=100), id="window-longer-than-all"),
        pytest.param(spec_of(4, 2, 8, chunk=4), id="chunks"),
        pytest.param(spec_of(4, 2, 8, soft_cap=2.0), id="soft-cap"),
        pytest.param(spec_of(4, 2, 8, soft_cap=2.0, window=3, value_size=4), id="soft-cap-window"),
    ],
)
@pytest.mark.parametrize("lengths", [MIXED, [(4, 1), (0, 1), (9, 1)], [(0, 9)]], ids=["mixed", "decode", "one"])
def test_equals_dense_float64(spec: AttentionSpec, lengths: list[tuple[int, int]]) -> None:
    case = make_case(spec, lengths)
    torch.testing.assert_close(attend(case).double(), case.expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("cuts", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_spans_attend_both_ways(window: int | None, cuts: bool) -> None:
    """A span in the first piece, one after a prefix, two touching, one already past, and one longer than the window."""
    spec = spec_of(4, 2, 8, window=window, window_cuts_spans=cuts)
    spans = [((2, 6),), ((5, 8), (8, 11)), ((1, 4),), ()]
    case = make_case(spec, [(0, 7), (4, 8), (6, 1), (3, 3)], spans=spans)
    torch.testing.assert_close(attend(case).double(), case.expected, atol=2e-6, rtol=1e-5)


def test_random_batches() -> None:
    rng = random.Random(1)
    for seed in range(40):
        kv_heads = rng.choice([1, 2, 3])
        spec = spec_of(
            kv_heads * rng.choice([1, 2, 4]),
            kv_heads,
            rng.choice([4, 8, 24]),
            window=rng.choice([None, None, 1, 2, 5, 17]),
            chunk=rng.choice([None, None, None, 3, 8]),
            soft_cap=rng.choice([None, None, 3.0]),
        )
        lengths = [(rng.choice([0, 0, rng.randint(1, 30)]), rng.choice([1, 1, rng.randint(2, 20)])) for _ in range(5)]
        case = make_case(spec, lengths, block_size=rng.choice([1, 3, 4, 16]), seed=seed)
        torch.testing.assert_close(attend(case).double(), case.expected, atol=5e-6, rtol=1e-5)


def test_bfloat16_is_as_close_as_bfloat16_can_be() -> None:
    case = make_case(spec_of(4, 2, 16), MIXED, dtype=torch.bfloat16)
    out = attend(case)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), case.expected, atol=2e-2, rtol=2e-2)


def test_writes_only_its_own_slots() -> None:
    case = make_case(spec_of(4, 2, 8), MIXED)
    before = case.cache.key.flatten(0, 1).clone()
    attend(case)
    after = case.cache.key.flatten(0, 1)
    changed = (before != after).flatten(1).any(1).nonzero().flatten().tolist()
    assert sorted(changed) == sorted(case.metadata.slot_mapping.tolist())
    torch.testing.assert_close(after[case.metadata.slot_mapping], case.key)


def test_a_layer_sees_no_other_sequence() -> None:
    """Other sequences' keys, however large, leave a sequence's output bit for bit as it was."""
    spec = spec_of(4, 2, 8)
    one, other = make_case(spec, [(3, 1), (0, 5)]), make_case(spec, [(3, 1), (0, 5)])
    attend(one)
    other.query[1:] *= 100
    other.key[1:] *= 100
    torch.testing.assert_close(attend(other)[:1], attend(one)[:1], atol=0, rtol=0)
