"""Layers of vision towers of the ViT kind (SigLIP, CLIP, Idefics, SmolVLM, ...) as one native call each.

As with decoder layers, a layer is taken by what it consists of, and then has to show that it is what it looks
like: on random input in float32 the native layer must give what the layer's own forward gives. It is worth it
where the library's products of bf16 are about as fast as torch's, and only there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from mmserve.kernels.encoder import ACTIVATIONS, EncoderWeights, NativeEncoderLayer
from mmserve.kernels.library import native_module
from mmserve.model.fuse import float_twin, join_weights
from mmserve.model.memory import give_back
from mmserve.model.replace_checks import any_overridden, plain_attributes

__all__ = ["replace_encoder_layers"]

_MANY = 1024
"""Rows that a tower's products have, about."""
_COLUMNS = 64
"""Of an MLP that are tried; a multiple of every vector width."""
_TOLERANCE = 2e-4
"""Of what a float32 layer adds to its input, relative to its size."""
_PARTS = {"layer_norm1", "self_attn", "layer_norm2", "mlp"}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


def replace_encoder_layers(modules: Iterable[nn.Module]) -> tuple[int, str | None]:
    """Replace those of `modules` that are such layers: how many were, and why the first that stays does."""
    library = native_module()
    layers: list[Any] = [module for module in modules if {name for name, _ in module.named_children()} >= _PARTS]
    if not layers:
        return 0, "the tower has no layers of two norms, attention and an MLP"
    if library is None or not library.encoder_pays(_MANY, layers[0].layer_norm1.weight.element_size()):
        return 0, "torch's own products are as fast here"
    tried: dict[object, str | None] = {}
    count, declined = 0, None
    for layer in layers:
        reason = _unlike_vit(layer)
        if reason is None:
            kind = tuple((name, type(part), plain_attributes(part)) for name, part in layer.named_modules())
            if kind not in tried:
                tried[kind] = _differs(layer)
            reason = tried[kind]
        if reason is not None:
            declined = declined or reason
            continue
        layer.forward = _forward(layer, _native(layer))
        give_back()  # the layer's unfused weights, before the next layer's fused ones are made
        count += 1
    return count, declined


def _unlike_vit(layer: Any) -> str | None:
    """Why a layer is not made of exactly the parts that the native one computes, or None."""
    name = type(layer).__name__
    if {child for child, _ in layer.named_children()} != _PARTS:
        return f"{name} has more than two norms, attention and an MLP"
    if (reason := any_overridden(layer.modules())) is not None:
        return reason
    linears = {
        child: part for child, part in layer.self_attn.named_children() if next(part.parameters(), None) is not None
    }
    if set(linears) != set(_PROJECTIONS):
        return f"{type(layer.self_attn).__name__} has other projections than {', '.join(_PROJECTIONS)}"
    if {child for child, _ in layer.mlp.named_children()} != {"activation_fn", "fc1", "fc2"}:
        return f"{type(layer.mlp).__name__} is not two projections with an activation between them"
    everything = [*linears.values(), layer.mlp.fc1, layer.mlp.fc2]
    if any(type(part) is not nn.Linear or part.bias is None for part in everything):
        return f"not all projections of {name} are plain linear layers with a bias"
    if any(type(norm) is not nn.LayerNorm or norm.bias is None for norm in (layer.layer_norm1, layer.layer_norm2)):
        return f"{name} has other norms than layer norms with a bias"
    if _heads(layer.self_attn) is None or _activation(layer.mlp.activation_fn) is None:
        return f"{name} names no number of heads, or has an activation that the kernels have not"
    dtypes = {parameter.dtype for parameter in layer.parameters()}
    sizes = [size for part in everything for size in part.weight.shape]
    if len(dtypes) != 1 or any(size % 2 for size in sizes):
        return f"{name} has weights of several types, or of an odd width"
    return None


def _heads(attention: Any) -> int | None:
    heads = getattr(attention, "num_heads", None)
    good = isinstance(heads, int) and heads > 0 and attention.q_proj.out_features % (2 * heads) == 0
    return heads if good else None


def _activation(function: Any) -> str | None:
    """The library's name of an activation, found by what it does."""
    x = torch.linspace(-6, 6, 64)
    try:
        given = function(x.clone())
    except (RuntimeError, TypeError):
        return None
    forms = (nn.functional.gelu(x, approximate="tanh"), x * torch.sigmoid(1.702 * x))
    return next((name for name, form in zip(ACTIVATIONS, forms, strict=True) if _near(given, form)), None)


def _near(given: torch.Tensor, wanted: torch.Tensor) -> bool:
    return given.shape == wanted.shape and torch.allclose(given, wanted, atol=1e-6)


def _native(layer: Any) -> NativeEncoderLayer:
    """The native layer of a layer, whose projections of queries, keys and values become views of one weight."""
    attention, mlp = layer.self_attn, layer.mlp
    heads, activation = _heads(attention), _activation(mlp.activation_fn)
    assert heads is not None
    assert activation is not None
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    weights = EncoderWeights(
        input_norm=layer.layer_norm1.weight.data,
        input_norm_bias=layer.layer_norm1.bias.data,
        input_eps=layer.layer_norm1.eps,
        qkv=join_weights(projections),
        qkv_bias=torch.cat([part.bias.data for part in projections]),
        output=attention.out_proj.weight.data.contiguous(),
        output_bias=attention.out_proj.bias.data,
        middle_norm=layer.layer_norm2.weight.data,
        middle_norm_bias=layer.layer_norm2.bias.data,
        middle_eps=layer.layer_norm2.eps,
        up=mlp.fc1.weight.data.contiguous(),
        up_bias=mlp.fc1.bias.data,
        down=mlp.fc2.weight.data.contiguous(),
        down_bias=mlp.fc2.bias.data,
    )
    return NativeEncoderLayer(weights, heads, (attention.q_proj.out_features // heads) ** -0.5, activation)


def _forward(layer: Any, native: NativeEncoderLayer) -> Callable[..., torch.Tensor]:
    """The layer's forward: native where nothing is masked, its own for anything else."""
    own = layer.forward
    dtype = layer.layer_norm1.weight.dtype

    def forward(hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        asked = any(value is not None and value is not False for value in kwargs.values())
        if attention_mask is not None or asked or hidden_states.dim() != 3 or hidden_states.dtype != dtype:
            out: torch.Tensor = own(hidden_states, attention_mask, **kwargs)
            return out
        return native(hidden_states.contiguous())

    return forward


def _differs(layer: Any) -> str | None:
    """What a float32 copy of the layer and the native layer do not agree on, or None."""
    mlp = layer.mlp
    twin = float_twin(
        layer,
        {
            mlp.fc1.weight: mlp.fc1.weight[:_COLUMNS],
            mlp.fc1.bias: mlp.fc1.bias[:_COLUMNS],
            mlp.fc2.weight: mlp.fc2.weight[:, :_COLUMNS],
        },
    )
    hidden = torch.randn(2, 7, twin.layer_norm1.weight.shape[0], generator=torch.Generator().manual_seed(0))
    try:
        expected = twin(hidden, attention_mask=None)
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        return f"{type(layer).__name__} does not run by itself: {error}"
    if not isinstance(expected, torch.Tensor) or expected.shape != hidden.shape:
        return f"{type(layer).__name__} does not return hidden states alone"
    added, wanted = _native(twin)(hidden) - hidden, expected - hidden
    error_size = float((added - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12))
    if error_size < _TOLERANCE:
        return None
    return f"the output of {type(layer).__name__} differs from the native layer's by {error_size:.1e} of its size"
