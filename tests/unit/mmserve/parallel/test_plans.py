"""Plans of classes: what is followed, and what is refused with a way out; stages and their placeholders."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

from fixtures.tiny_models.families import FAMILIES
from fixtures.tiny_models.shrink import tiny_config
from mmserve.errors import ConfigError, EngineError, UnsupportedModelError
from mmserve.parallel.group import Group
from mmserve.parallel.layout import Layout
from mmserve.parallel.plan import STYLES, pipeline_plan, tensor_plan
from mmserve.parallel.stages import HandedOver, LayerRange, deal_layers, keep_stage
from mmserve.parallel.tensor import shard_model


def empty(name: str, **more: Any) -> Any:
    """A family's tiny model on the meta device."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    config = tiny_config(name, {**FAMILIES[name].config, **more})
    auto = AutoModelForImageTextToText
    if type(config) not in auto._model_mapping:
        auto = AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(config)


def test_every_style_of_transformers_is_known_but_one() -> None:
    from transformers.distributed import expert_parallel, tensor_parallel  # noqa: F401
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    plans = {name for name in ALL_PARALLEL_STYLES if not name.startswith(("ep_", "grouped", "router", "gather"))}
    own = {name for name in plans if type(ALL_PARALLEL_STYLES[name]).__module__.endswith(".tensor_parallel")}
    assert own - STYLES.keys() == {"sequence_parallel"}


def test_patterns_reach_every_layer_by_qualified_name() -> None:
    plan = tensor_plan(empty("smolvlm"))
    assert plan["model.text_model.layers.1.self_attn.q_proj"] == "column"
    assert plan["model.text_model.layers.0.mlp.down_proj"] == "row"
    assert plan["lm_head"] == "column_gathered"
    assert not any("vision" in name for name in plan)


def test_a_class_whose_plan_names_no_layer_borrows_its_twin_s() -> None:
    plan = tensor_plan(empty("qwen3_vl"))
    assert plan["model.language_model.layers.2.self_attn.q_proj"] == "column"
    assert len(pipeline_plan(empty("qwen3_vl"))) == 3


@pytest.mark.parametrize(("name", "message"), [("mllama", "carries no"), ("lfm2_vl", "reaches none of its layers")])
def test_no_plan_is_an_error_that_names_the_class_and_the_way_out(name: str, message: str) -> None:
    model = empty(name)
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        tensor_plan(model)
    assert type(model).__name__ in str(caught.value)
    assert "tensor_parallel_plan" in str(caught.value)
    assert "pipeline_parallel" in str(caught.value)


def test_a_plan_of_the_caller_s_is_checked() -> None:
    model = empty("llama")
    with pytest.raises(ConfigError, match="colwize"):
        tensor_plan(model, {"model.layers.*.mlp.up_proj": "colwize"})
    with pytest.raises(ConfigError, match=r"does not have: model\.layers\.\*\.mlp\.up$"):
        tensor_plan(model, {"model.layers.*.mlp.up": "colwise", "model.layers.*.mlp.up_proj": "colwise"})


def test_a_plan_on_something_else_than_a_linear_layer_is_refused() -> None:
    model = empty("llama")
    plan = {"model.layers.0.input_layernorm": "column", "model.layers.0.mlp.up_proj": "column"}
    with pytest.raises(UnsupportedModelError, match=r"input_layernorm, which is a LlamaRMSNorm"):
        shard_model(model, plan, Group(None, 0, 2))


def test_a_norm_over_all_heads_needs_a_plan_that_gathers() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads = 4
            self.q_proj = nn.Linear(8, 16, bias=False, device="meta")
            self.q_norm = nn.RMSNorm(16, device="meta")

    model = nn.ModuleDict({"attention": Attention()})
    with pytest.raises(UnsupportedModelError, match="colwise_gather_output"):
        shard_model(model, {"attention.q_proj": "column"}, Group(None, 0, 2))


def test_tied_tensors_are_dealt_alike_or_refused() -> None:
    model = empty("gemma2")
    plan = {name: style for name, style in tensor_plan(model).items() if name != "lm_head"}
    with pytest.raises(UnsupportedModelError, match=r"lm_head\.weight and model\.embed_tokens\.weight differently"):
        shard_model(model, plan, Group(None, 0, 2))


def test_layers_are_dealt_by_bytes_with_tower_and_head_counted() -> None:
    assert deal_layers([1] * 8, 0, 0, 2) == [LayerRange(0, 4), LayerRange(4, 8)]
    assert deal_layers([1] * 8, 4, 0, 2) == [LayerRange(0, 2), LayerRange(2, 8)]
    assert deal_layers([1] * 8, 0, 3, 3) == [LayerRange(0, 3), LayerRange(3, 7), LayerRange(7, 8)]
    assert deal_layers([9, 1, 1, 1], 0, 0, 2) == [LayerRange(0, 1), LayerRange(1, 4)]
    assert deal_layers([1, 1], 100, 0, 2) == [LayerRange(0, 1), LayerRange(1, 2)]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_has_its_layers_and_placeholders_that_raise(stage: int) -> None:
    model = empty("llava")
    kept = keep_stage(model, Layout(1, 2).place(stage))
    names = {name.split(".")[1] for name, _ in model.named_parameters() if name.startswith("model.")}
    assert ("vision_tower" in names) == (stage == 0)
    assert ("embed_tokens" in str([name for name, _ in model.named_parameters()])) == (stage == 0)
    assert ("lm_head.weight" in dict(model.named_parameters())) == (stage == 1)
    assert kept.layers == LayerRange(stage, stage + 1)
    missing = model.lm_head if stage == 0 else model.model.vision_tower
    with pytest.raises(EngineError, match="was called on a pipeline stage that does not have it"):
        missing(torch.zeros(1))


def test_a_tied_table_is_on_both_ends() -> None:
    model = empty("gemma2")
    keep_stage(model, Layout(1, 2).place(1))
    assert "model.embed_tokens.weight" in dict(model.named_parameters())
    assert model.all_tied_weights_keys
    first = empty("gemma2")
    keep_stage(first, Layout(1, 2).place(0))
    assert not first.all_tied_weights_keys


def test_models_that_can_not_be_staged_say_why() -> None:
    place = Layout(1, 3).place(0)
    with pytest.raises(UnsupportedModelError, match="has 2 layers, too few for 3"):
        keep_stage(empty("llama"), place)
    with pytest.raises(UnsupportedModelError, match="carries no pipeline plan"):
        keep_stage(empty("mllama"), place)
    with pytest.raises(UnsupportedModelError, match=r"only the first stage has.* take tensor_parallel instead"):
        keep_stage(empty("gemma4"), place)
    with pytest.raises(UnsupportedModelError, match=r"its last 1 layers read the caches of earlier ones"):
        keep_stage(empty("gemma4", **{"text_config.num_kv_shared_layers": 1}), place)
    several = empty("llama")
    several._pp_plan = {**several.pp_plan, "model.layers.0.others": None}
    several.model.layers[0].others = nn.ModuleList([nn.Identity()])
    with pytest.raises(UnsupportedModelError, match="2 lists of layers"):
        keep_stage(several, place)
    none = empty("llama")
    none._pp_plan = {name: plan for name, plan in none.pp_plan.items() if not name.endswith("layers")}
    with pytest.raises(UnsupportedModelError, match=r"0 lists of layers \(none\)"):
        keep_stage(none, place)


def test_no_dealing_is_more_even() -> None:
    """Against all ways to cut a dozen random lists of layers."""
    random = Random(3)
    for _ in range(12):
        sizes = [random.randint(1, 9) for _ in range(random.randint(3, 8))]
        before, after, stages = random.randint(0, 20), random.randint(0, 20), random.randint(2, 3)

        def fullest(cuts: Sequence[int], sizes: list[int] = sizes, ends: tuple[int, int] = (before, after)) -> int:
            loads = [sum(sizes[start:stop]) for start, stop in pairwise((0, *cuts, len(sizes)))]
            return max([loads[0] + ends[0], *loads[1:-1], loads[-1] + ends[1]])

        dealt = deal_layers(sizes, before, after, stages)
        assert [dealt[0].start, dealt[-1].stop] == [0, len(sizes)]
        assert all(one.stop == other.start for one, other in pairwise(dealt))
        best = min(map(fullest, combinations(range(1, len(sizes)), stages - 1)))
        assert fullest([part.start for part in dealt[1:]]) == best


def test_placeholders_of_layers_pass_hand_over_or_raise() -> None:
    model = empty("llama", num_hidden_layers=5)
    kept = keep_stage(model, Layout(1, 3).place(1))
    start, stop = kept.layers.start, kept.layers.stop
    assert 0 < start < stop < 5
    rows = torch.zeros(1, 2, 8)
    assert model.model.layers[start - 1](rows) is rows
    with pytest.raises(HandedOver) as handed:
        model.model.layers[stop](rows)
    assert handed.value.rows is rows
    first = empty("llama", num_hidden_layers=5)
    keep_stage(first, Layout(1, 3).place(0))
    with pytest.raises(EngineError, match=r"model\.layers\.4 was called on a pipeline stage that does not have it"):
        first.model.layers[4](rows)
