"""A vision tower on the CPU: native attention and activation, and one picture tile through it at a time.

The tower keeps its modules; what changes is the function that its attention layers look up by name, the
activation between its two projections, and how much of a batch runs at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_outputs import BaseModelOutput

from mmserve.kernels.library import kernels
from mmserve.model.replace_checks import any_overridden, overridden
from mmserve.model.replace_encoder import replace_encoder_layers

__all__ = ["NAME", "encoder_attention", "replace_tower"]

NAME = "mmserve_encoder"
_TANH_GELUS = ("GELUTanh", "PytorchGELUTanh")
_DTYPES = (torch.bfloat16, torch.float32)


def replace_tower(model: Any) -> Iterator[tuple[str, int, str | None]]:
    """Replace what can be; yields (what, how many, why not)."""
    text = model.config.get_text_config()
    towers = [
        name
        for name in model.config.sub_configs
        if (config := getattr(model.config, name, None)) is not None and config is not text and "vision" in name
    ]
    if not towers:
        yield "vision attention", 0, "the model has no vision config of its own"
        return
    AttentionInterface.register(NAME, encoder_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    current = getattr(getattr(model.config, towers[0]), "_attn_implementation", None)
    if current != "sdpa":
        yield "vision attention", 0, f"the tower runs on {current!r} attention, not on sdpa"
    elif not kernels().attention_pays(model.dtype.itemsize):
        yield "vision attention", 0, "torch's own runs on the processor's matrix units, and the kernels here do not"
    else:
        try:
            model.set_attn_implementation(dict.fromkeys(towers, NAME))
            yield "vision attention", len(towers), None
        except (ValueError, KeyError, AttributeError) as error:
            yield "vision attention", 0, f"it can not be set: {error}"
    inside = [module for name, module in model.named_modules() if "vision" in name]
    yield ("vision layers as one native call", *replace_encoder_layers(inside))
    yield "vision activations", sum(_replace_activation(module) for module in inside), None
    yield "vision encoders, one tile at a time", sum(_split_batches(module) for module in inside), None


def encoder_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: query [b, H, S, D], key and value [b, K, L, D] -> [b, S, H, Dv].

    With a mask, a causal layer or a dtype that the kernel has not, the call goes on to torch's own.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    plain = attention_mask is None and not causal and dropout == 0.0 and key.shape[1] == value.shape[1]
    if plain and query.dtype in _DTYPES and query.device.type == "cpu" and query.shape[-1] % 2 == 0:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return kernels().full_attention(_dense(query), _dense(key), _dense(value), scale), None
    out: torch.Tensor = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
    )[0]
    return out, None


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class _NativeGelu(nn.Module):
    """GELU, the tanh form, over its input: only between two projections, where nothing else reads that."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return kernels().gelu_tanh_(x.contiguous())


def _replace_activation(mlp: nn.Module) -> bool:
    """Whether `mlp` is two projections with a tanh GELU between them, now the native one."""
    parts = dict(mlp.named_children())
    if set(parts) != {"activation_fn", "fc1", "fc2"} or parts["fc1"].weight.dtype not in _DTYPES:
        return False
    if any_overridden(mlp.modules()) is not None:
        return False
    activation = parts["activation_fn"]
    tanh = type(activation).__name__ in _TANH_GELUS or getattr(activation, "approximate", None) == "tanh"
    x = torch.linspace(-6, 6, 64)
    tanh = tanh and torch.allclose(activation(x), nn.functional.gelu(x, approximate="tanh"), atol=1e-6)
    if tanh:
        mlp.activation_fn = _NativeGelu()
    return tanh


def _split_batches(encoder: Any) -> bool:
    """Whether `encoder` is a plain stack of layers over [tiles, patches, width], from now on one tile at a time.

    The activations of one tile stay in the cache between layers; those of a whole picture's tiles do not.
    """
    if not type(encoder).__name__.endswith("Encoder") or set(dict(encoder.named_children())) != {"layers"}:
        return False
    if overridden(encoder) is not None:
        return False
    encoder.forward = _tile_by_tile(encoder.forward)
    return True


def _tile_by_tile(own: Callable[..., Any]) -> Callable[..., Any]:
    def forward(inputs_embeds: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        extras = [*args, *kwargs.values()]
        if inputs_embeds.shape[0] == 1 or any(extra is not None for extra in extras):
            return own(inputs_embeds, *args, **kwargs)
        parts = [own(part, *args, **kwargs) for part in inputs_embeds.split(1)]
        if any(type(part) is not BaseModelOutput or len(part.keys()) != 1 for part in parts):
            return own(inputs_embeds, *args, **kwargs)
        return BaseModelOutput(last_hidden_state=torch.cat([part.last_hidden_state for part in parts]))

    return forward
