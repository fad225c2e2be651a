"""How dimensions, fused weights and heads are dealt to ranks."""

from __future__ import annotations

import pytest
import torch

from mmserve.errors import UnsupportedModelError
from mmserve.parallel.shares import balanced, share_heads, share_packed, share_width


@pytest.mark.parametrize(("size", "parts"), [(8, 2), (101, 2), (7, 3), (2, 2)])
def test_balanced_ranges_cover_all_and_differ_by_one(size: int, parts: int) -> None:
    ranges = [balanced(size, parts, index) for index in range(parts)]
    assert [ranges[0][0], *(stop for _, stop in ranges)] == [0, *(start for start, _ in ranges[1:]), size]
    lengths = [stop - start for start, stop in ranges]
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("dim", [-1, -2])
def test_shares_of_all_ranks_are_the_whole(dim: int) -> None:
    whole = torch.arange(5 * 7).reshape(5, 7)
    parts = [share_width(dim, whole.shape[dim], rank, 3).cut(whole) for rank in range(3)]
    assert torch.equal(torch.cat(parts, dim=dim), whole)


def test_a_packed_share_keeps_gates_over_ups() -> None:
    """As the docstring draws it: gates and ups of a rank, fused as they were."""
    gate_up = torch.arange(12).reshape(12, 1)
    share = share_packed(-2, 12, 2, rank=1, ranks=2)
    assert share.cut(gate_up).flatten().tolist() == [3, 4, 5, 9, 10, 11]
    assert share.of_part().cut(gate_up[:6]).flatten().tolist() == [3, 4, 5]
    assert share.shape((12, 1)) == (6, 1)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "expected"),
    [
        (4, 2, 2, [((0, 2), (0, 1)), ((2, 4), (1, 2))]),
        (9, 3, 2, [((0, 6), (0, 2)), ((6, 9), (2, 3))]),  # whole groups: the first rank has one more
        (4, 1, 2, [((0, 2), (0, 1)), ((2, 4), (0, 1))]),  # a copy of the only one on each rank
        (8, 2, 4, [((0, 2), (0, 1)), ((2, 4), (0, 1)), ((4, 6), (1, 2)), ((6, 8), (1, 2))]),
        (5, 1, 2, [((0, 3), (0, 1)), ((3, 5), (0, 1))]),
    ],
)
def test_query_heads_stay_with_their_key_head(
    heads: int, kv_heads: int, ranks: int, expected: list[tuple[tuple[int, int], tuple[int, int]]]
) -> None:
    found = [share_heads(heads, kv_heads, rank, ranks) for rank in range(ranks)]
    assert [(share.heads, share.kv_heads) for share in found] == expected
    assert found[0].of_queries(-2, heads * 8).length == (expected[0][0][1] - expected[0][0][0]) * 8


def test_heads_that_do_not_go_round_are_refused_with_what_does() -> None:
    with pytest.raises(UnsupportedModelError, match=r"6 query heads over 2 .* to 3 ranks; .* can be 1, 2, 4, 6"):
        share_heads(6, 2, 0, 3)
    with pytest.raises(UnsupportedModelError, match="can not be dealt to 8 ranks"):
        share_heads(4, 1, 0, 8)
