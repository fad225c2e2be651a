"""A text model whose decoder layers are all native, as one call from its first layer to its last.

Between two native layers lies Python: modules, hooks, arguments. That is about a millisecond a step for thirty of
them, which a small model notices. The text model keeps its rotary embedding and its last norm; what must hold for
the shortcut is shown by trial, on random input: not a bit of the output or the cache may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from mmserve.attention.interface import LayerCache
from mmserve.attention.native import NativeBackend
from mmserve.kernels.decoder import NativeDecoderLayer, NativeDecoderStack
from mmserve.model.replace_decoder import alone, trial_metadata
from mmserve.model.text_attention import LayerBinding, PagedStep

__all__ = ["replace_stack"]

_SERVED = frozenset({"inputs_embeds", "position_ids", "paged"})
_AS_USUAL = {"use_cache": False, "output_attentions": False, "output_hidden_states": False, "return_dict": True}
"""Arguments of the text model that the shortcut serves, and values of others that change nothing. With anything else
the model's own forward runs."""


def replace_stack(model: Any, layers: Mapping[nn.Module, NativeDecoderLayer]) -> str | None:
    """Give the text model the shortcut; or why not.

    Args:
        model: A loaded transformers model.
        layers: Its decoder layers that are native already, as `replace_decoder_layers` gives them.
    """
    decoder = model.get_decoder()
    if [*decoder.layers] != [*layers]:
        return f"only {len(layers)} of {len(decoder.layers)} layers are native"
    if not isinstance(getattr(decoder, "norm", None), nn.Module):
        return f"{type(decoder).__name__} has no last norm of its own"
    own = decoder.forward
    short = _forward(decoder, own, NativeDecoderStack(list(layers.values())))
    with alone(layers):
        reason = _differs(model, own, short, layers)
    if reason is None:
        decoder.forward = short
    return reason


class _CacheLists:
    """Keys and values of the layers in order; made anew when others are bound."""

    def __init__(self, attentions: list[nn.Module]) -> None:
        self._attentions = attentions
        self._bindings: object = None
        self._made: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])

    def of(self, step: PagedStep) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        if self._bindings is not step.layers:
            caches = [step.layers[attention].cache for attention in self._attentions]
            self._made = [cache.key for cache in caches], [cache.value for cache in caches]
            self._bindings = step.layers
        return self._made


def _forward(decoder: Any, own: Callable[..., Any], stack: NativeDecoderStack) -> Callable[..., Any]:
    caches = _CacheLists([layer.self_attn for layer in decoder.layers])

    def forward(*args: Any, **kwargs: Any) -> Any:
        step, embeds = kwargs.get("paged"), kwargs.get("inputs_embeds")
        if args or not _as_usual(kwargs) or not isinstance(step, PagedStep) or step.more_metadata:
            return own(*args, **kwargs)
        if embeds is None or embeds.shape[0] != 1:
            return own(*args, **kwargs)
        cos, sin = decoder.rotary_emb(embeds, position_ids=kwargs["position_ids"])
        if cos.dim() != 3 or cos.shape[:2] != embeds.shape[:2] or cos.dtype != embeds.dtype:
            return own(*args, **kwargs)
        keys, values = caches.of(step)
        hidden = stack(embeds[0].contiguous(), cos[0].contiguous(), sin[0].contiguous(), keys, values, step.metadata)
        return BaseModelOutputWithPast(last_hidden_state=decoder.norm(hidden[None]))

    return forward


def _as_usual(kwargs: Mapping[str, Any]) -> bool:
    return all(
        value is None or name in _SERVED or (name in _AS_USUAL and value is _AS_USUAL[name])
        for name, value in kwargs.items()
    )


def _differs(
    model: Any, own: Callable[..., Any], short: Callable[..., Any], layers: Mapping[nn.Module, NativeDecoderLayer]
) -> str | None:
    """What the text model and its shortcut do not agree on, or None."""
    embeddings = model.get_input_embeddings().weight
    metadata, slots = trial_metadata()
    random = torch.Generator().manual_seed(0)
    embeds = torch.randn(1, len(slots), embeddings.shape[1], generator=random).to(embeddings.dtype)
    positions = torch.tensor([[3, 0, 1, 2, 3, 4]])
    outcomes = []
    for forward in (own, short):
        bindings = _trial_bindings(layers, embeddings.dtype)
        step = PagedStep(bindings, metadata)
        try:
            output = forward(inputs_embeds=embeds, position_ids=positions, use_cache=False, paged=step)
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            return f"{type(model.get_decoder()).__name__} does not run by itself: {error}"
        caches = [tensor for bound in bindings.values() for tensor in (bound.cache.key, bound.cache.value)]
        outcomes.append([output.last_hidden_state, *caches])
    if all(torch.equal(mine, theirs) for mine, theirs in zip(*outcomes, strict=True)):
        return None
    return f"{type(model.get_decoder()).__name__} does more between its layers than pass hidden states on"


def _trial_bindings(
    layers: Mapping[nn.Module, NativeDecoderLayer], dtype: torch.dtype
) -> Mapping[nn.Module, LayerBinding]:
    """A small random cache for each layer, the same ones on every call."""
    random = torch.Generator().manual_seed(1)

    def some(spec: Any) -> torch.Tensor:
        return torch.randn(3, 4, spec.num_kv_heads, spec.head_size, generator=random).to(dtype)

    return {
        layer.get_submodule("self_attn"): LayerBinding(
            native.spec, LayerCache(some(native.spec), some(native.spec)), NativeBackend()
        )
        for layer, native in layers.items()
    }
