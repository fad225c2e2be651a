"""Replaced layers give what the originals give; layers that only look alike are found out and left alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.activations import ACT2FN

from mmserve.attention.interface import AttentionMetadata, AttentionSpec, LayerCache
from mmserve.attention.native import NativeBackend
from mmserve.kernels.library import native_module, status
from mmserve.kernels.linear import FewRowLinear, weight_product
from mmserve.model import text_attention
from mmserve.model.replace import replace_layers
from mmserve.model.replace_decoder import replace_decoder_layers
from mmserve.model.replace_stack import replace_stack
from mmserve.model.replace_tower import NAME, encoder_attention, replace_tower
from mmserve.model.text_attention import LayerBinding, PagedStep
from mmserve.parallel.group import Group
from mmserve.parallel.layers import RowLinear

pytestmark = pytest.mark.skipif(not status().native, reason=f"no compiled kernels: {status().reason}")

TEXT = {
    "vocab_size": 50,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def text_model(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """With weights large enough that each part of a layer shows in its output."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.mul_(5) if parameter.dim() == 2 else parameter.add_(0.1 * torch.randn_like(parameter))
    text_attention.register()
    text_attention.route(model, text_attention.NAME)
    return model


def specs_of(model: Any, **more: Any) -> dict[nn.Module, AttentionSpec]:
    return {
        layer.self_attn: AttentionSpec(i, 6, 2, 16, 16, scale=layer.self_attn.scaling, **more)
        for i, layer in enumerate(model.get_decoder().layers)
    }


def run(model: Any, specs: Mapping[nn.Module, AttentionSpec], lengths: list[tuple[int, int]]) -> torch.Tensor:
    """Logits [T, V] of a packed batch of (cached, new) sequences; what is cached is random."""
    dtype = next(model.parameters()).dtype
    random = torch.Generator().manual_seed(1)
    tables = torch.arange(2 * len(lengths), dtype=torch.int32).view(-1, 2)
    caches = [
        LayerCache(*(torch.randn(tables.numel(), 16, 2, 16, generator=random).to(dtype) for _ in range(2)))
        for _ in specs
    ]
    positions = [position for past, new in lengths for position in range(past, past + new)]
    slots = [i * 32 + p for i, (past, new) in enumerate(lengths) for p in range(past, past + new)]
    news = [new for _, new in lengths]
    metadata = AttentionMetadata(
        query_lens=tuple(news),
        key_lens=tuple(past + new for past, new in lengths),
        cu_seqlens_q=torch.tensor([0, *torch.tensor(news).cumsum(0)], dtype=torch.int32),
        key_lens_tensor=torch.tensor([past + new for past, new in lengths], dtype=torch.int32),
        block_tables=tables,
        slot_mapping=torch.tensor(slots),
        spans=((),) * len(lengths),
    )
    bindings = {
        module: LayerBinding(spec, cache, NativeBackend())
        for (module, spec), cache in zip(specs.items(), caches, strict=True)
    }
    ids = torch.randint(0, 50, (1, len(slots)), generator=random)
    with torch.inference_mode():
        step = PagedStep(bindings, metadata)
        return model(
            inputs_embeds=model.get_input_embeddings()(ids),
            position_ids=torch.tensor([positions]),
            use_cache=False,
            paged=step,
        ).logits[0]


def replace_decoder(
    model: Any, specs: Mapping[nn.Module, AttentionSpec], native: frozenset[nn.Module]
) -> tuple[int, str | None]:
    """How many, and the first reason."""
    taken, left = replace_decoder_layers(model, specs, native)
    return len(taken), left[0][1] if left else None


STEPS = pytest.mark.parametrize("lengths", [[(5, 1), (0, 1), (20, 1)], [(0, 24), (3, 1)]], ids=["decode", "many-rows"])


class TestDecoderLayers:
    @STEPS
    @pytest.mark.parametrize(
        "config",
        [LlamaConfig(**TEXT), Qwen2Config(**TEXT), LlamaConfig(**TEXT, attention_bias=True)],
        ids=["llama", "qwen2-biases", "llama-biases"],
    )
    def test_give_the_same(self, config: Any, lengths: list[tuple[int, int]]) -> None:
        model = text_model(config)
        specs = specs_of(model)
        expected = run(model, specs, lengths)
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        assert replace_decoder(model, specs, frozenset(specs)) == (2, None)
        torch.testing.assert_close(run(model, specs, lengths), expected, atol=1e-4, rtol=1e-4)
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())

    @STEPS
    def test_in_bfloat16_they_are_as_near_to_float32_as_the_originals(self, lengths: list[tuple[int, int]]) -> None:
        exact = text_model(LlamaConfig(**TEXT), torch.bfloat16).float()
        expected = run(exact, specs_of(exact), lengths)
        model = text_model(LlamaConfig(**TEXT), torch.bfloat16)
        specs = specs_of(model)
        before = (run(model, specs, lengths).float() - expected).pow(2).mean().sqrt()
        assert replace_decoder(model, specs, frozenset(specs))[0] == 2
        after = (run(model, specs, lengths).float() - expected).pow(2).mean().sqrt()
        assert after < 1.5 * before

    def test_weights_are_not_kept_twice(self) -> None:
        model = text_model(LlamaConfig(**TEXT))
        specs = specs_of(model)
        replace_decoder_layers(model, specs, frozenset(specs))
        attention = model.model.layers[0].self_attn
        pointers = {part.weight.untyped_storage().data_ptr() for part in (attention.q_proj, attention.v_proj)}
        assert len(pointers) == 1

    def test_the_native_layer_really_runs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = text_model(LlamaConfig(**TEXT))
        specs = specs_of(model)
        replace_decoder_layers(model, specs, frozenset(specs))
        for layer in model.model.layers:
            monkeypatch.setattr(layer.mlp, "forward", lambda _: pytest.fail("the layer's own forward ran"))
        run(model, specs, [(0, 3)])

    @pytest.mark.parametrize(
        ("config", "reason"),
        [
            (Qwen3Config(**TEXT), "keys of Qwen3DecoderLayer differ|other projections"),
            (GemmaConfig(**TEXT, hidden_activation="silu"), "GemmaDecoderLayer differ"),
            (LlamaConfig(**TEXT, hidden_act="relu"), "output of LlamaDecoderLayer differ"),
            (LlamaConfig(**TEXT, mlp_bias=True), "LlamaMLP has biases"),
        ],
        ids=["norm-on-queries", "norm-plus-one", "other-activation", "mlp-bias"],
    )
    def test_look_alikes_stay_as_they_are(self, config: Any, reason: str) -> None:
        model = text_model(config)
        specs = specs_of(model)
        expected = run(model, specs, [(0, 5), (2, 1)])
        count, why = replace_decoder(model, specs, frozenset(specs))
        assert count == 0
        assert any(part in str(why) for part in reason.split("|")), why
        assert torch.equal(run(model, specs, [(0, 5), (2, 1)]), expected)

    @pytest.mark.parametrize("where", ["", "self_attn.q_proj", "mlp", "input_layernorm"])
    @pytest.mark.parametrize("how", ["hook", "pre-hook", "forward"])
    def test_a_hook_or_a_forward_put_there_later_is_not_left_out(self, where: str, how: str) -> None:
        model = text_model(LlamaConfig(**TEXT))
        specs = specs_of(model)
        part = model.model.layers[1].get_submodule(where)
        if how == "hook":
            part.register_forward_hook(lambda module, args, output: None)
        elif how == "pre-hook":
            part.register_forward_pre_hook(lambda module, args: None)
        else:
            part.forward = type(part).forward.__get__(part)
        taken, ((layer, why),) = replace_decoder_layers(model, specs, frozenset(specs))
        assert list(taken) == [model.model.layers[0]]
        assert layer is model.model.layers[1]
        assert "has hooks" in why or "has a forward of its own" in why

    def test_layers_of_another_backend_stay(self) -> None:
        model = text_model(LlamaConfig(**TEXT))
        count, why = replace_decoder(model, specs_of(model), frozenset())
        assert (count, why) == (0, "the attention of LlamaDecoderLayer is not served by the native backend")


class TestStack:
    """All native layers of a text model in one call."""

    def replaced(self, config: Any = None) -> tuple[Any, dict[nn.Module, AttentionSpec], str | None]:
        model = text_model(config or LlamaConfig(**TEXT))
        specs = specs_of(model)
        layers, _ = replace_decoder_layers(model, specs, frozenset(specs))
        return model, specs, replace_stack(model, layers)

    @STEPS
    def test_gives_the_same_bits(self, lengths: list[tuple[int, int]]) -> None:
        model = text_model(LlamaConfig(**TEXT))
        specs = specs_of(model)
        layers, _ = replace_decoder_layers(model, specs, frozenset(specs))
        expected = run(model, specs, lengths)
        assert replace_stack(model, layers) is None
        assert torch.equal(run(model, specs, lengths), expected)

    def test_really_runs_and_only_then(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, specs, reason = self.replaced()
        assert reason is None
        for layer in model.model.layers:
            monkeypatch.setattr(layer, "forward", lambda *_, **__: pytest.fail("a layer ran by itself"))
        run(model, specs, [(0, 3)])
        with pytest.raises(pytest.fail.Exception, match="by itself"):
            model(torch.tensor([[1, 2]]), use_cache=False)

    def test_stays_away_from_a_model_of_which_some_layers_are_not_native(self) -> None:
        model = text_model(LlamaConfig(**TEXT))
        specs = specs_of(model)
        layers, _ = replace_decoder_layers(model, specs, frozenset(specs))
        first = next(iter(layers))
        assert replace_stack(model, {first: layers[first]}) == "only 1 of 2 layers are native"

    def test_stays_away_from_a_model_that_does_something_between_layers(self) -> None:
        model = text_model(LlamaConfig(**TEXT))
        specs = specs_of(model)
        layers, _ = replace_decoder_layers(model, specs, frozenset(specs))
        model.model.layers[0].register_forward_hook(lambda _module, _inputs, output: output * 1.5)
        assert "does more between its layers" in str(replace_stack(model, layers))
        assert model.model.forward.__name__ != "<lambda>"

    def test_an_argument_that_it_does_not_know_goes_to_the_models_own_forward(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, specs, _ = self.replaced()
        seen = []
        for layer in model.model.layers:
            monkeypatch.setattr(layer, "forward", lambda hidden, **_: seen.append(1) or hidden)
        run(model, specs, [(0, 3)])
        assert not seen
        embeds = torch.randn(1, 3, model.config.hidden_size)
        with torch.inference_mode():
            model.model(inputs_embeds=embeds, position_ids=torch.arange(3)[None], use_cache=True)
        assert seen


def vision_model(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = Idefics3Config(
        text_config={"model_type": "llama", **TEXT},
        vision_config={
            "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 3,
            "image_size": 32, "patch_size": 8,
        },
        scale_factor=2,
        image_token_id=49,
    )  # fmt: skip
    return Idefics3ForConditionalGeneration._from_config(config, dtype=dtype).eval().requires_grad_(False)


FLOAT32 = "torch's own products are as fast here"


class TestTower:
    @pytest.mark.parametrize("padded", [False, True])
    def test_features_are_the_same(self, padded: bool) -> None:
        model = vision_model()
        pixels = torch.randn(1, 3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        mask = torch.ones(1, 3, 32, 32, dtype=torch.bool)
        mask[0, 1, :, 16:] = not padded
        with torch.inference_mode():
            expected = model.get_image_features(pixels, mask, return_dict=True).pooler_output
            done = list(replace_tower(model))
            actual = model.get_image_features(pixels, mask, return_dict=True).pooler_output
        assert [(count, why) for _, count, why in done] == [(1, None), (0, FLOAT32), (2, None), (1, None)]
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("instruction_set", ["amx", "avx512", "avx2", "plain"])
    def test_what_torch_does_better_is_said(self, instruction_set: str) -> None:
        """Where there are matrix units, torch uses them: kernels that do not leave a bfloat16 tower to it."""
        module = native_module()
        if module is None or instruction_set not in module.available_instruction_sets():
            pytest.skip(f"{instruction_set} can not run here")
        before = module.active_instruction_set()
        module.use_instruction_set(instruction_set)
        try:
            pays = module.attention_pays(2)
            said = {what: (count, why) for what, count, why in replace_tower(vision_model(torch.bfloat16))}
        finally:
            module.use_instruction_set(before)
        reason = "torch's own runs on the processor's matrix units, and the kernels here do not"
        assert pays or instruction_set != "amx"
        assert said["vision attention"] == ((1, None) if pays else (0, reason))
        assert all(count or why for count, why in said.values())

    def test_the_kernel_really_runs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = vision_model()  # in float32 it pays everywhere
        list(replace_tower(model))
        assert model.config.vision_config._attn_implementation == NAME
        assert model.config.text_config._attn_implementation != NAME
        monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", lambda *_, **__: pytest.fail("torch ran"))
        model.get_image_features(torch.randn(1, 2, 3, 32, 32), return_dict=True)

    @pytest.mark.parametrize(("causal", "masked"), [(False, False), (True, False), (False, True)])
    def test_what_the_kernel_has_not_goes_to_torch(self, causal: bool, masked: bool) -> None:
        query, key, value = torch.randn(3, 2, 3, 6, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
        mask = torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(1)) > 0.3 if masked else None
        if mask is not None:
            mask[..., 0] = True
        out, _ = encoder_attention(nn.Module(), query, key, value, mask, scaling=0.5, is_causal=causal)
        expected = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=0.5
        )
        torch.testing.assert_close(out, expected.transpose(1, 2))


def test_everything_at_once_and_what_is_said_of_it() -> None:
    model = vision_model()
    text_attention.register()
    text_attention.route(model, text_attention.NAME)
    specs = specs_of(model)
    said = [replacement.describe() for replacement in replace_layers(model, specs, frozenset(specs))]
    assert [(entry["count"], entry["declined"]) for entry in said] == [
        (2, None), (1, None), (1, None), (15, None), (1, None), (0, FLOAT32), (2, None), (1, None),
    ]  # fmt: skip
    assert isinstance(model.lm_head, FewRowLinear)
    assert isinstance(model.model.vision_model.encoder.layers[0].mlp.activation_fn, nn.Module)
    assert type(ACT2FN["gelu_pytorch_tanh"]).__name__ == "GELUTanh"


def test_a_rank_s_part_of_a_layer_takes_the_kernels_product_and_keeps_its_exchange() -> None:
    model = vision_model()
    text_attention.register()
    text_attention.route(model, text_attention.NAME)
    specs = specs_of(model)
    head = model.lm_head
    x = torch.randn(3, head.in_features)
    expected = head(x)
    RowLinear.become(head, Group(None, 0, 1), None)
    replace_layers(model, specs, frozenset(specs))
    assert type(head) is RowLinear
    assert head.product is weight_product
    torch.testing.assert_close(head(x), expected)
