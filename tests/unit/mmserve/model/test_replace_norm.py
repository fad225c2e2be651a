"""A norm is replaced by what it computes, not by its name; every one that stays says why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from fixtures.tiny_models.families import FAMILIES
from fixtures.tiny_models.family import build, make_prompt
from mmserve.conformance.packed import PackedRun, run_packed
from mmserve.kernels.library import status
from mmserve.model import load_model
from mmserve.model.replace import Replacement, _linears, _norms
from mmserve.model.replace_norm import replace_norms

pytestmark = pytest.mark.skipif(not status().native, reason=f"no compiled kernels: {status().reason}")

WIDTH = 24


class BareRMSNorm(nn.Module):
    """Without weight."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps).to(x.dtype)


class OddRMSNorm(LlamaRMSNorm):
    """Looks like one; `how` says what is odd."""

    def __init__(self, how: str) -> None:
        super().__init__(WIDTH)
        self.how = how
        if how == "bias":
            self.bias = nn.Parameter(torch.zeros(WIDTH))
        if how == "tensor":
            self.scales = torch.ones(WIDTH)
        if how == "child":
            self.inner = nn.Identity()
        if how == "no epsilon":
            self.eps = self.variance_epsilon
            del self.variance_epsilon, self.eps

    def forward(self, x: torch.Tensor, *gate: torch.Tensor) -> torch.Tensor:
        if self.how == "gate":
            return x * gate[0]
        if self.how == "mean":
            x = x - x.mean(-1, keepdim=True)
        eps = 1e-2 if self.how == "other epsilon" else getattr(self, "variance_epsilon", 1e-6)
        weight = self.weight**2 if self.how == "squared weight" else self.weight
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        return normed.sum(-1) if self.how == "sum" else weight * normed


class Holder(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([norm, nn.Linear(2, 2)])


def replaced(norm: nn.Module) -> list[tuple[str, str, str | None]]:
    for parameter in norm.parameters():
        parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    with torch.inference_mode():
        return list(replace_norms(Holder(norm), frozenset()))


@pytest.mark.parametrize(
    ("make", "form"),
    [
        (lambda: LlamaRMSNorm(WIDTH), "plain"),
        (lambda: nn.RMSNorm(WIDTH, eps=1e-5), "plain"),
        (lambda: GemmaRMSNorm(WIDTH), "one plus weight"),
        (BareRMSNorm, "without weight"),
    ],
    ids=["llama", "torch", "gemma", "bare"],
)
def test_the_three_forms(make: Callable[[], nn.Module], form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    norm = make()
    own = type(norm).forward
    assert replaced(norm) == [("layers.0", form, None)]
    x = torch.randn(2, 5, 3, WIDTH, generator=torch.Generator().manual_seed(1)).transpose(1, 2)
    expected = own(norm, x)
    monkeypatch.setattr(torch, "rsqrt", lambda _: pytest.fail("the module's own forward ran"))
    torch.testing.assert_close(norm(x), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("mean", "computes something else than an RMS norm"),
        ("squared weight", "computes something else than an RMS norm"),
        ("other epsilon", "computes something else than an RMS norm"),
        ("sum", "does not give one tensor like its input"),
        ("gate", "does not run on hidden states alone: IndexError"),
        ("bias", "has parameters bias, weight"),
        ("child", "has parts of its own"),
        ("tensor", "has parts of its own"),
        ("no epsilon", "names no epsilon"),
    ],
)
def test_look_alikes_stay(how: str, why: str) -> None:
    norm = OddRMSNorm(how)
    assert replaced(norm) == [("layers.0", "", f"OddRMSNorm {why}")]
    assert "forward" not in vars(norm)


def test_hooks_stay() -> None:
    norm = LlamaRMSNorm(WIDTH)
    norm.register_forward_hook(lambda module, args, output: output + 1)
    assert replaced(norm) == [("layers.0", "", "LlamaRMSNorm has hooks, which a replacement would not call")]


def test_in_half_precision_one_plus_weight_would_round_twice() -> None:
    ((_, form, why),) = replaced(GemmaRMSNorm(256).bfloat16())
    assert form == ""
    assert "rounds worse than GemmaRMSNorm in torch.bfloat16" in str(why)
    assert replaced(LlamaRMSNorm(256).bfloat16()) == [("layers.0", "plain", None)]


def test_each_is_listed() -> None:
    model = nn.ModuleDict(
        {"a": Holder(LlamaRMSNorm(WIDTH)), "b": Holder(OddRMSNorm("mean")), "c": Holder(BareRMSNorm())}
    )
    with torch.inference_mode():
        said = [entry.describe() for entry in _norms(model, frozenset())]
    why = "OddRMSNorm computes something else than an RMS norm"
    assert said == [
        {"what": "RMS norms, plain", "count": 1, "declined": None, "left_alone": {}},
        {"what": "RMS norms, without weight", "count": 1, "declined": None, "left_alone": {}},
        {"what": "RMS norms", "count": 0, "declined": why, "left_alone": {"b.layers.*": why}},
    ]


class OddLinear(nn.Linear):
    """A class of its own."""


def test_linears_that_stay_are_listed() -> None:
    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4), OddLinear(8, 4), nn.Linear(7, 4)])

        def get_decoder(self) -> nn.Module:
            return self

        def get_output_embeddings(self) -> None:
            return None

    model = Text()
    model.layers[1].register_forward_pre_hook(lambda module, args: None)
    names = {module: name.replace("layers.", "layer_") for name, module in model.named_modules()}
    with torch.inference_mode():
        said = _linears(model, names)
    assert said == Replacement(
        "linear layers of the text model",
        1,
        "Linear has hooks, which a replacement would not call",
        {
            "layer_1": "Linear has hooks, which a replacement would not call",
            "layer_2": "it is a OddLinear, not a plain Linear",
            "layer_3": "its weight of (4, 7) is not in dense rows of an even length",
        },
    )


@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl", "smolvlm", "glm4v"])
def test_on_and_off_give_the_same_tokens(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    folder = build(family, tmp_path)
    prompts = [make_prompt(family, [3, (1, 0), 5]), make_prompt(family, [9], 1)]
    models = [load_model(folder, block_size=16, device="cpu", replace=replace) for replace in (True, False)]
    on, off = (run_packed(model, prompts, PackedRun(new_tokens=6, chunk=5)) for model in models)
    for mine, plain in zip(on, off, strict=True):
        assert mine.token_ids == plain.token_ids
        torch.testing.assert_close(torch.stack(mine.logprobs), torch.stack(plain.logprobs), atol=1e-4, rtol=0)
    done, none = (model.describe()["replacements"] for model in models)
    assert sum(entry["count"] for entry in done) > 3  # type: ignore[attr-defined]
    assert none == [{"what": "layers", "count": 0, "declined": "switched off", "left_alone": {}}]
