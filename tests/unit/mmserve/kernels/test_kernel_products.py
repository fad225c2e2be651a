"""Few-row products, norm and activations against float64, over odd sizes, rows at a time and together."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from closeness import DTYPES, assert_near
from torch import nn

from mmserve.kernels.interface import KernelLibrary
from mmserve.kernels.library import native_module
from mmserve.kernels.linear import FewRowLinear

SHAPES = [(1, 2), (7, 30), (16, 32), (17, 34), (33, 576), (100, 130)]
"""(outputs, inputs): fewer outputs than a tile has rows, inputs that end inside a vector."""


def normal(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", range(1, 17))
def test_linear(library: KernelLibrary, rows: int, dtype: torch.dtype) -> None:
    for n, k in SHAPES:
        x, weight = normal(rows, k, dtype=dtype, seed=1), normal(n, k, dtype=dtype, seed=2) / k**0.5
        bias, residual = normal(n, dtype=dtype, seed=3), normal(rows, n, dtype=dtype, seed=4)
        product = x.double() @ weight.double().T
        assert_near(library.linear(x, weight, None, None), product)
        assert_near(library.linear(x, weight, bias, None), product + bias.double())
        assert_near(library.linear(x, weight, bias, residual), product + bias.double() + residual.double(), factor=2)


ACTIVATED = {
    "none": lambda y: y,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    "quick_gelu": lambda y: y * torch.sigmoid(1.702 * y),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 64, 80, 131])
def test_dense(library: KernelLibrary, rows: int, dtype: torch.dtype) -> None:
    for n, k in [*SHAPES, (48, 64), (50, 36), (300, 48)]:
        x, weight = normal(rows, k, dtype=dtype, seed=1), normal(n, k, dtype=dtype, seed=2) / k**0.5
        bias, residual = normal(n, dtype=dtype, seed=3), normal(rows, n, dtype=dtype, seed=4)
        product = x.double() @ weight.double().T
        assert_near(library.dense(x, weight, None, None, "none"), product)
        for activation, form in ACTIVATED.items():
            expected = form(product + bias.double()) + residual.double()
            assert_near(library.dense(x, weight, bias, residual, activation), expected, factor=3)


@pytest.mark.parametrize(("rows", "k"), [(70, 300), (600, 700), (131, 2048), (300, 3072)])
def test_sums_in_several_chunks_and_blocks(compiled: KernelLibrary, rows: int, k: int) -> None:
    x, weight = normal(rows, k, dtype=torch.bfloat16, seed=1), normal(50, k, dtype=torch.bfloat16, seed=2) / k**0.5
    together = compiled.dense(x, weight, None, None, "none")
    assert_near(together, x.double() @ weight.double().T)
    assert torch.equal(compiled.dense(x[5:9], weight, None, None, "none"), together[5:9])


@pytest.mark.parametrize("activation", ["gelu_tanh", "quick_gelu"])
def test_activations_of_large_values(compiled: KernelLibrary, activation: str) -> None:
    x = torch.tensor([-300.0, -90, -60, 0, 60, 90, 300]).bfloat16()[:, None] * torch.eye(1, 2).bfloat16()
    given = compiled.dense(x, torch.eye(2).bfloat16(), None, None, activation)[:, 0]
    assert_near(given, ACTIVATED[activation](x[:, 0].double()))


def test_dense_products_are_worth_it_for_bfloat16_alone(compiled: KernelLibrary) -> None:
    assert not compiled.dense_pays(1024, 4)
    before = compiled.active_instruction_set()
    try:
        compiled.use_instruction_set("plain")
        assert not compiled.dense_pays(1024, 2)
    finally:
        compiled.use_instruction_set(before)


def test_rows_may_lie_apart(library: KernelLibrary) -> None:
    wide, weight = normal(3, 64, dtype=torch.float32, seed=1), normal(5, 20, dtype=torch.float32, seed=2)
    assert_near(library.linear(wide[:, 10:30], weight, None, None), wide[:, 10:30].double() @ weight.double().T)


def test_what_does_not_fit_is_refused(compiled: KernelLibrary) -> None:
    x, weight = torch.zeros(2, 8), torch.zeros(4, 8)
    for bad in (
        (torch.zeros(17, 8), weight, None, None),
        (x, torch.zeros(4, 6), None, None),
        (x, weight.bfloat16(), None, None),
        (x, weight, torch.zeros(3), None),
        (x, weight, None, torch.zeros(2, 5)),
        (x.double(), weight.double(), None, None),
        (torch.zeros(2, 7).bfloat16(), torch.zeros(4, 7).bfloat16(), None, None),
    ):
        with pytest.raises(RuntimeError):
            compiled.linear(*bad)
    for bad_dense in (
        (x, torch.zeros(4, 6), None, None, "none"),
        (x, weight, torch.zeros(3), None, "none"),
        (x, weight, None, torch.zeros(2, 5), "none"),
        (torch.zeros(2, 7).bfloat16(), torch.zeros(4, 7).bfloat16(), None, None, "none"),
    ):
        with pytest.raises(RuntimeError):
            compiled.dense(*bad_dense)


def test_an_unknown_activation_is_named(library: KernelLibrary) -> None:
    with pytest.raises(ValueError, match=r"no activation 'relu'.*quick_gelu"):
        library.dense(torch.zeros(2, 8), torch.zeros(4, 8), None, None, "relu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 16, 31, 576])
def test_row_wise_operations(library: KernelLibrary, width: int, dtype: torch.dtype) -> None:
    x, weight = 3 * normal(3, width, dtype=dtype, seed=1), normal(width, dtype=dtype, seed=2)
    wide = x.double()
    expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    assert_near(library.rms_norm(x, weight, 1e-5), expected)

    bias = normal(width, dtype=dtype, seed=5)
    shifted = x + 20  # a mean far from zero: squares of the whole would lose the deviations
    normed = F.layer_norm(shifted.double(), (width,), weight.double(), bias.double(), 1e-5)
    assert_near(library.layer_norm(shifted, weight, bias, 1e-5), normed, factor=20 if dtype == torch.float32 else 1)

    gate_up = 4 * normal(2, 3, 2 * width, dtype=dtype, seed=3)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_near(library.silu_mul(gate_up), F.silu(gate) * up)

    x = 4 * normal(5, width, dtype=dtype, seed=4)
    expected = F.gelu(x.double(), approximate="tanh")
    out = library.gelu_tanh_(x)
    assert out.data_ptr() == x.data_ptr()
    assert_near(out, expected)


def test_activations_at_the_ends_of_the_range(library: KernelLibrary) -> None:
    x = torch.tensor([-1e30, -300.0, -100.0, -20.0, 0.0, 20.0, 100.0, 300.0, 1e15])
    assert_near(library.gelu_tanh_(x.clone()), F.gelu(x.double(), approximate="tanh"))
    assert_near(library.silu_mul(torch.cat([x, torch.ones(9)])), F.silu(x.double()))


class TestFewRowLinear:
    def make(self, dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Linear, nn.Linear]:
        plain = nn.Linear(48, 20).to(dtype).requires_grad_(False)
        fast = nn.Linear(48, 20).to(dtype).requires_grad_(False)
        fast.load_state_dict(plain.state_dict())
        FewRowLinear.take_over(fast)
        return plain, fast

    @pytest.mark.parametrize("shape", [(48,), (1, 48), (2, 8, 48), (17, 48), (1, 40, 48)])
    def test_gives_what_linear_gives(self, shape: tuple[int, ...]) -> None:
        plain, fast = self.make()
        x = normal(*shape, dtype=torch.bfloat16, seed=1)
        assert_near(fast(x), F.linear(x.double(), plain.weight.double(), plain.bias.double()))

    def test_keeps_its_parameters_and_what_is_tied_to_them(self) -> None:
        embedding = nn.Embedding(20, 48)
        linear = nn.Linear(48, 20, bias=False)
        linear.weight = embedding.weight
        FewRowLinear.take_over(linear)
        assert linear.weight is embedding.weight
        assert set(linear.state_dict()) == {"weight"}
        assert isinstance(linear, nn.Linear)

    def test_takes_the_kernel_for_few_rows(self, compiled: KernelLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
        _, fast = self.make(torch.float32)
        monkeypatch.setattr(F, "linear", lambda *_: pytest.fail("few rows went through torch"))
        fast(normal(16, 48, dtype=torch.float32, seed=1))
        with pytest.raises(pytest.fail.Exception):
            fast(normal(17, 48, dtype=torch.float32, seed=1))

    def test_declines(self) -> None:
        class Other(nn.Linear):
            pass

        assert "Other" in str(FewRowLinear.declines(Other(4, 4)))
        assert "float64" in str(FewRowLinear.declines(nn.Linear(4, 4).double()))
        assert "even" in str(FewRowLinear.declines(nn.Linear(5, 4)))
        assert FewRowLinear.declines(nn.Linear(4, 5)) is None
        with pytest.raises(ValueError, match="even"):
            FewRowLinear.take_over(nn.Linear(5, 4))


def test_the_library_says_how_many_rows(library: KernelLibrary) -> None:
    assert library.most_linear_rows == 16
    assert native_module() is None or native_module().most_linear_rows == 16
