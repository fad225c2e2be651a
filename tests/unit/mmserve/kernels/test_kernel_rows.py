"""A row's result is the same, bit for bit, whatever the rows beside it: what keeps a request's tokens its own."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from closeness import DTYPES

from mmserve.kernels.linear import weight_product

MANY = 64
Rows = Callable[[torch.Tensor], torch.Tensor]
"""Some rows [rows, width] -> as many rows."""


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check_rows(f: Rows, x: torch.Tensor, most: int) -> None:
    """The first 1 .. `most` of x's rows, and each alone, give what they give in the midst of all."""
    whole = f(x[:most])
    for rows in range(1, most):
        assert torch.equal(f(x[:rows]), whole[:rows]), f"{rows} rows are other than they are among {most}"
        assert torch.equal(f(x[rows : rows + 1]), whole[rows : rows + 1]), f"row {rows} alone is another"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(1, 2), (7, 30), (33, 576), (100, 130)])
def test_products(native: ModuleType, n: int, k: int, dtype: torch.dtype) -> None:
    x, weight, bias = normal(131, k, dtype=dtype), normal(n, k, dtype=dtype, seed=1), normal(n, dtype=dtype, seed=2)
    check_rows(lambda x: native.linear(x, weight, bias, None), x, native.most_linear_rows)

    def dense(x: torch.Tensor) -> torch.Tensor:
        return native.dense(x, weight, bias, None, "gelu_tanh")

    check_rows(dense, x, MANY)
    among_more = dense(x)
    for begin, end in ((0, 1), (3, 70), (0, MANY), (100, 131)):
        assert torch.equal(dense(x[begin:end]), among_more[begin:end])


def test_on_matrix_units_few_and_many_rows_are_one_product(native: ModuleType) -> None:
    """Everywhere else a layer's rows go through one kernel up to 16, and through another after that."""
    if native.active_instruction_set() != "amx":
        pytest.skip("it is about matrix units")
    x, weight = normal(MANY, 576, dtype=torch.bfloat16), normal(96, 576, dtype=torch.bfloat16, seed=1)
    assert native.dense_pays(MANY, 2)
    check_rows(lambda x: weight_product(x, weight), x, MANY)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 31, 576])
def test_row_wise_operations(native: ModuleType, width: int, dtype: torch.dtype) -> None:
    x, weight = normal(MANY, width, dtype=dtype), normal(width, dtype=dtype, seed=1)
    check_rows(lambda x: native.rms_norm(x, weight, 1e-5), x, MANY)
    check_rows(lambda x: native.layer_norm(x, weight, weight, 1e-5), x, MANY)
    check_rows(lambda x: native.gelu_tanh_(x.clone()), x, MANY)
    check_rows(native.silu_mul, normal(MANY, 2 * width, dtype=dtype), MANY)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [64, 72])
def test_queries_of_a_tower(native: ModuleType, head_size: int, dtype: torch.dtype) -> None:
    x = normal(MANY, 2 * 2 * head_size, dtype=dtype)
    key, value = normal(2, 1, 2, 300, head_size, dtype=dtype, seed=1).unbind(0)

    def attend(x: torch.Tensor) -> torch.Tensor:
        query = x.view(1, len(x), 4, head_size).transpose(1, 2)
        return native.full_attention(query, key, value, 0.1)[0].flatten(1)

    check_rows(attend, x, MANY)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sequences_of_a_batch(native: ModuleType, dtype: torch.dtype) -> None:
    """One new token of each of 64, 64 prompts, and one beside the other; each also alone."""
    lengths, block = [1 + 37 * i % 600 for i in range(MANY)], 16
    num_blocks = [-(-length // block) for length in lengths]
    caches = normal(2, sum(num_blocks), block, 2, 64, dtype=dtype).unbind(0)
    tables = torch.zeros(MANY, max(num_blocks), dtype=torch.int32)
    for i, count in enumerate(num_blocks):
        tables[i, :count] = torch.arange(count) + sum(num_blocks[:i])
    query = normal(MANY * 5, 6, 64, dtype=dtype, seed=1)

    def attend(sequences: list[tuple[int, int]]) -> list[torch.Tensor]:
        """(which, its new tokens) of each -> its rows."""
        new = torch.tensor([count for _, count in sequences])
        rows = torch.cat([query[5 * which : 5 * which + count] for which, count in sequences])
        hi = torch.cat([torch.arange(count) + lengths[which] - count + 1 for which, count in sequences])
        which = [which for which, _ in sequences]
        out = native.paged_attention(
            rows, *caches, torch.cat([new.new_zeros(1), new.cumsum(0)]).int(),
            torch.tensor([lengths[i] for i in which], dtype=torch.int32), tables[which].contiguous(),
            (hi - 200).clamp(min=0).int(), hi.int(), 0.125, 0.0,
        )  # fmt: skip
        return list(out.split(new.tolist()))

    for most in ([1] * MANY, [5] * MANY, [1, 5] * (MANY // 2)):
        batch = [(i, min(most[i], lengths[i])) for i in range(MANY)]
        together = attend(batch)
        for part in (batch[:1], batch[:16], batch[:17], batch[7:40]):
            for (which, _), rows in zip(part, attend(part), strict=True):
                assert torch.equal(rows, together[which])
        for i in range(MANY):
            assert torch.equal(attend(batch[i : i + 1])[0], together[i])
