"""Each style that transformers names: two ranks' shares together answer as the whole module does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fixtures.tiny_models.thread_ranks import on_ranks
from mmserve.parallel.group import Group
from mmserve.parallel.plan import STYLES
from mmserve.parallel.shares import Share
from mmserve.parallel.tensor import shard_model

WIDTH, INNER, ROWS = 6, 7, 11  # the inner width and the vocabulary do not divide by two
INPUT = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1))
IDS = torch.arange(ROWS)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.up(x)))


class FusedMlp(nn.Module):
    """Gates and ups in one layer, told apart by halves."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(WIDTH, 2 * INNER)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class One(nn.Module):
    """Its layer alone."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Experts(nn.Module):
    """Two experts in one tensor, each used for all rows; and one that gives its input back."""

    def __init__(self, last: bool, identity: bool) -> None:
        super().__init__()
        self.last = last
        gate_up = (2, WIDTH, 2 * INNER) if last else (2, 2 * INNER, WIDTH)
        down = (2, INNER, WIDTH) if last else (2, WIDTH, INNER)
        self.gate_up_proj = nn.Parameter(torch.empty(gate_up))
        self.down_proj = nn.Parameter(torch.empty(down))
        self.zero = nn.Identity() if identity else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x)
        for gate_up, down in zip(self.gate_up_proj, self.down_proj, strict=True):
            gate, up = (x @ (gate_up if self.last else gate_up.T)).chunk(2, dim=-1)
            total = total + (F.silu(gate) * up) @ (down if self.last else down.T)
        return total if self.zero is None else total + self.zero(x)


class Block(nn.Module):
    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.experts = Experts(**options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x)


class TinyAttention(nn.Module):
    """Heads as transformers' layers have them: queries after keys, counted by attributes; norms with a row a head."""

    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads = heads, kv_heads
        self.num_key_value_groups = heads // kv_heads
        self.head_dim = 4
        self.q_proj = nn.Linear(WIDTH, heads * 4)
        self.k_proj = nn.Linear(WIDTH, kv_heads * 4)
        self.v_proj = nn.Linear(WIDTH, kv_heads * 4, bias=False)
        self.o_proj = nn.Linear(heads * 4, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            layer(x).view(len(x), -1, 4).transpose(0, 1) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        key, value = (heads.repeat_interleave(self.num_key_value_groups, dim=0) for heads in (key, value))
        assert query.shape[0] == self.num_heads
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(out.transpose(0, 1).flatten(1))


class Attentive(nn.Module):
    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.self_attn = TinyAttention(heads, kv_heads)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.self_attn(x)


@dataclass(frozen=True)
class Case:
    """A module, its plan in transformers' words, and its input."""

    build: Callable[[], nn.Module]
    plan: dict[str, str]
    input: torch.Tensor = INPUT


ATTENTION = {f"self_attn.{name}_proj": "colwise" for name in "qkv"} | {"self_attn.o_proj": "rowwise"}
CASES = {
    "columns then rows, biases": Case(Mlp, {"up": "colwise", "down": "rowwise"}),
    "gathered columns": Case(Mlp, {"up": "colwise_gather_output"}),
    "gathered columns, old name": Case(Mlp, {"up": "colwise_rep"}),
    "rows of a whole input": Case(Mlp, {"down": "rowwise_split_input"}),
    "rows of a whole input, old name": Case(Mlp, {"down": "rowwise_rep"}),
    "fused gates and ups": Case(FusedMlp, {"gate_up": "packed_colwise", "down": "rowwise"}),
    "experts": Case(
        lambda: Block(last=False, identity=False),
        {
            "experts.gate_up_proj": "packed_colwise",
            "experts.down_proj": "rowwise",
            "experts": "moe_tp_experts",
        },
    ),
    "experts, the other way round, and one that gives back": Case(
        lambda: Block(last=True, identity=True),
        {
            "experts.gate_up_proj": "packed_rowwise",
            "experts.down_proj": "colwise",
            "experts.zero": "moe_identity_expert",
            "experts": "all_reduce",
        },
    ),
    "vocabulary": Case(lambda: One(nn.Embedding(ROWS, WIDTH)), {"layer": "embedding_rowwise"}, IDS),
    "vocabulary, padded": Case(
        lambda: One(nn.Embedding(ROWS + 5, WIDTH, padding_idx=ROWS - 1)), {"layer": "embedding_rowwise"}, IDS
    ),
    "embedding's columns": Case(lambda: One(nn.Embedding(ROWS, INNER)), {"layer": "embedding_colwise"}, IDS),
    "head": Case(lambda: One(nn.Linear(WIDTH, ROWS, bias=False)), {"layer": "colwise_gather_output"}),
    "heads": Case(lambda: Attentive(4, 2), ATTENTION),
    "heads that do not divide": Case(lambda: Attentive(6, 3), ATTENTION),
    "one key head for both": Case(lambda: Attentive(4, 1), ATTENTION),
    "one key head, heads that do not divide": Case(lambda: Attentive(5, 1), ATTENTION),
    **{f"whole: {style}": Case(Mlp, {"up": style, "down": style}) for style, kind in STYLES.items() if kind == "whole"},
}


def part(case: Case, whole: nn.Module, group: Group) -> tuple[nn.Module, dict[str, Share]]:
    """A rank's share of `whole`, with its values."""
    with torch.device("meta"):
        model = case.build()
    shares = shard_model(model, {name: STYLES[style] for name, style in case.plan.items()}, group)
    for name, values in whole.named_parameters():
        owner, _, child = name.rpartition(".")
        own = shares[name].cut(values) if name in shares else values
        assert model.get_parameter(name).shape == own.shape
        setattr(model.get_submodule(owner), child, nn.Parameter(own, requires_grad=False))
    return model, shares


def whole_of(case: Case) -> nn.Module:
    module = case.build()
    generator = torch.Generator().manual_seed(2)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    return module.requires_grad_(False)


def test_every_style_has_a_case() -> None:
    assert {style for case in CASES.values() for style in case.plan.values()} == STYLES.keys()


@pytest.mark.parametrize("name", CASES)
def test_shares_together_answer_as_the_whole(name: str) -> None:
    case = CASES[name]
    whole = whole_of(case)
    expected = whole(case.input)

    def work(group: Group) -> tuple[torch.Tensor, int, int]:
        model, shares = part(case, whole, group)
        return model(case.input), sum(p.numel() for p in model.parameters()), len(shares)

    total = sum(p.numel() for p in whole.parameters())
    for found, held, num_shares in on_ranks(2, work):
        assert found.shape == expected.shape
        assert torch.allclose(found, expected, atol=1e-5)
        assert (held < total) == (num_shares > 0)


def test_ranks_have_the_same_bits() -> None:
    """What a sum over ranks gives is the same on all of them, or they would choose different ways from there on."""
    case = CASES["columns then rows, biases"]
    whole = whole_of(case)
    one, other = on_ranks(2, lambda group: part(case, whole, group)[0](case.input))
    assert torch.equal(one, other)


def test_an_embedding_s_own_forward_runs_inside() -> None:
    """A scale that the family multiplies by stays."""

    class Scaled(nn.Embedding):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 3.0

    case = Case(lambda: One(Scaled(ROWS, WIDTH)), {"layer": "embedding_rowwise"}, IDS)
    whole = whole_of(case)
    for found in on_ranks(2, lambda group: part(case, whole, group)[0](case.input)):
        assert torch.equal(found, whole(case.input))


def test_three_ranks_deal_eleven_rows() -> None:
    for name in ("vocabulary", "head", "columns then rows, biases", "heads that do not divide"):
        case: Any = CASES[name]
        whole = whole_of(case)
        for found in on_ranks(3, lambda group, case=case, whole=whole: part(case, whole, group)[0](case.input)):
            assert torch.allclose(found, whole(case.input), atol=1e-5)


def test_an_mlp_beside_unequal_heads_is_dealt_evenly() -> None:
    """Three heads over two ranks: ranks meet between the two, so the MLP can not make up for the first one's heads."""
    plan = {"layer.mlp.up": "column", "layer.mlp.down": "row"}
    plan |= {f"layer.self_attn.{name}_proj": "column" for name in "qkv"} | {"layer.self_attn.o_proj": "row"}
    widths = []
    for rank in range(2):
        with torch.device("meta"):
            layer = nn.Module()
            layer.self_attn, layer.mlp = TinyAttention(3, 3), Mlp()
            layer.mlp.up, layer.mlp.down = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)
        shard_model(One(layer), plan, Group(None, rank, 2))
        widths.append((layer.self_attn.q_proj.out_features, layer.mlp.up.out_features, layer.mlp.down.in_features))
    (heads_0, *first), (heads_1, *second) = widths
    assert heads_0 == 2 * heads_1
    assert first == second == [20, 20]


def test_a_rank_that_tries_its_part_alone_exchanges_nothing() -> None:
    group = Group(None, 0, 2)  # any exchange would be an error of another kind
    x = torch.randn(3, 4)
    with group.alone():
        assert group.all_reduce(x) is x
        with pytest.raises(RuntimeError, match="begun while this rank tried its own part"):
            group.all_gather(x)
    assert group.traffic.calls == 0
