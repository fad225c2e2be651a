"""Layers of vision towers in one call: which are taken, that they give the same, and when their own forward runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import CLIPVisionConfig, CLIPVisionModel, SiglipVisionConfig, SiglipVisionModel

from mmserve.kernels.library import native_module, status
from mmserve.model.replace_encoder import replace_encoder_layers

SIZES = {"hidden_size": 48, "intermediate_size": 72, "num_attention_heads": 3, "image_size": 32, "patch_size": 8}


@pytest.fixture(autouse=True)
def worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the processor is: bfloat16 pays, float32 does not."""
    module = native_module()
    if module is None:
        pytest.skip(f"no compiled kernels: {status().reason}")
    monkeypatch.setattr(module, "encoder_pays", lambda rows, element_size: element_size == 2)


def tower(kind: str = "siglip", dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    if kind == "siglip":
        model: Any = SiglipVisionModel(SiglipVisionConfig(**SIZES, num_hidden_layers=3, vision_use_head=False))
    else:
        model = CLIPVisionModel(CLIPVisionConfig(**SIZES, num_hidden_layers=3, hidden_act="quick_gelu"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))  # fresh biases are zero and norms one
    return model.to(dtype).eval().requires_grad_(False)


def pixels(count: int = 2) -> torch.Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(1)).bfloat16()


def layers(model: Any) -> Any:
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))


@pytest.mark.parametrize("kind", ["siglip", "clip"])
def test_a_tower_gives_the_same_and_keeps_its_weights(kind: str) -> None:
    model, wide = tower(kind), tower(kind, torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.inference_mode():
        exact = wide(pixels().float()).last_hidden_state
        theirs = model(pixels()).last_hidden_state
        assert replace_encoder_layers(model.modules()) == (3, None)
        ours = model(pixels()).last_hidden_state
        one = model(pixels()[:1]).last_hidden_state
    assert (ours - exact).norm() <= 1.2 * (theirs - exact).norm()
    assert torch.equal(one, ours[:1])
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    attention = layers(model)[0].self_attn
    assert attention.q_proj.weight.data_ptr() < attention.k_proj.weight.data_ptr()
    assert attention.q_proj.weight.untyped_storage().data_ptr() == attention.v_proj.weight.untyped_storage().data_ptr()


def test_hidden_states_of_all_layers_can_be_had() -> None:
    model = tower()
    with torch.inference_mode():
        expected = model(pixels(), output_hidden_states=True).hidden_states
        replace_encoder_layers(model.modules())
        given = model(pixels(), output_hidden_states=True).hidden_states
    assert len(given) == len(expected) == 4
    for one, other in zip(given, expected, strict=True):
        torch.testing.assert_close(one, other, atol=0.06, rtol=0.06)


def test_a_mask_goes_to_the_layers_own_forward() -> None:
    plain, model = tower(), tower()
    replace_encoder_layers(model.modules())
    hidden = torch.randn(1, 16, 48, generator=torch.Generator().manual_seed(2)).bfloat16()
    mask = torch.zeros(1, 1, 16, 16, dtype=torch.bfloat16)
    mask[..., 5:] = float("-inf")
    with torch.inference_mode():
        assert torch.equal(layers(model)[0](hidden, mask), layers(plain)[0](hidden, mask))


def test_a_layer_that_computes_something_else_stays() -> None:
    model = tower()
    for layer in layers(model):
        layer.self_attn.scale *= 3
    count, reason = replace_encoder_layers(model.modules())
    assert count == 0
    assert "SiglipEncoderLayer differs from the native layer's by" in str(reason)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda layer: layer.add_module("scale", nn.Identity()), "has more than two norms"),
        (lambda layer: layer.register_forward_hook(lambda *_: None), "has hooks"),
        (lambda layer: setattr(layer, "layer_norm1", nn.RMSNorm(48).bfloat16()), "other norms than layer norms"),
        (lambda layer: setattr(layer.mlp, "activation_fn", nn.ReLU()), "an activation that the kernels have not"),
        (lambda layer: setattr(layer.mlp, "fc1", nn.Linear(48, 72, bias=False).bfloat16()), "with a bias"),
        (lambda layer: layer.self_attn.add_module("gate", nn.Linear(48, 48)), "other projections than"),
        (lambda layer: layer.mlp.add_module("gate", nn.Linear(48, 72)), "is not two projections"),
        (lambda layer: layer.layer_norm1.float(), "weights of several types"),
    ],
)
def test_what_is_not_such_a_layer_stays(change: Any, reason: str) -> None:
    model = tower()
    change(layers(model)[1])
    count, declined = replace_encoder_layers(model.modules())
    assert count == 2
    assert reason in str(declined)


def test_float32_stays_with_torch() -> None:
    assert replace_encoder_layers(tower(dtype=torch.float32).modules()) == (0, "torch's own products are as fast here")


def test_a_tower_without_such_layers_is_told() -> None:
    assert replace_encoder_layers(nn.Sequential(nn.Linear(2, 2)).modules())[0] == 0
