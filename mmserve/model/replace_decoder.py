"""Decoder layers of the Llama kind (Llama, Mistral, Qwen2, SmolLM2, ...) as one native call each.

A layer is taken by what it consists of, not by its name, and then has to show that it is what it looks like:
in float32, on random input over a small cache, the native layer must give what the layer's own forward gives,
output and cache both. Layers with anything more (norms on queries, a fifth projection, scaled residuals) differ
there and stay as they are.

Of a layer that ranks share each rank tries its own part, as if that were the whole, and decides for itself: native or
not, a rank sums the same rows in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from mmserve.attention.interface import AttentionMetadata, AttentionSpec, LayerCache
from mmserve.attention.reference import ReferenceBackend
from mmserve.kernels.decoder import DecoderWeights, NativeDecoderLayer
from mmserve.model.fuse import float_twin, join_weights
from mmserve.model.memory import give_back
from mmserve.model.replace_checks import any_overridden, plain_attributes
from mmserve.model.text_attention import LayerBinding, PagedStep
from mmserve.parallel.group import Group
from mmserve.parallel.layers import RowLinear

__all__ = ["alone", "replace_decoder_layers", "trial_metadata"]

_COLUMNS = 64
"""Of an MLP that are tried; a multiple of every vector width."""
_TOLERANCE = 2e-4
"""Of a float32 layer's output, relative to its size; a rotation left out moves even near-uniform attention by more."""


def replace_decoder_layers(
    model: Any, specs: Mapping[nn.Module, AttentionSpec], native: frozenset[nn.Module]
) -> tuple[dict[nn.Module, NativeDecoderLayer], list[tuple[nn.Module, str]]]:
    """Replace the layers that can be: these, in order, and each that can not be with its reason.

    Layers that differ in nothing but their weights are tried once: the trial shows the structure.
    """
    decoder = model.get_decoder()
    rotary = getattr(decoder, "rotary_emb", None)
    layers = getattr(decoder, "layers", None)
    if rotary is None or not isinstance(layers, nn.ModuleList):
        return {}, [(decoder, f"{type(decoder).__name__} has no list of layers with one rotary embedding")]
    tried: dict[object, str | None] = {}
    taken: dict[nn.Module, NativeDecoderLayer] = {}
    left: list[tuple[nn.Module, str]] = []
    layer: Any
    for layer in layers:
        reason = _unlike_llama(layer, specs, native)
        if reason is None:
            kind = _kind(layer, specs[layer.self_attn])
            if kind not in tried:
                with alone([layer]):
                    tried[kind] = _differs(layer, specs[layer.self_attn], rotary)
            reason = tried[kind]
        if reason is not None:
            left.append((layer, reason))
            continue
        spec = specs[layer.self_attn]
        taken[layer] = _native(layer, spec)
        layer.forward = _forward(layer, taken[layer], spec.head_size)
        give_back()  # the layer's unfused weights, before the next layer's fused ones are made
    return taken, left


def _unlike_llama(layer: Any, specs: Mapping[nn.Module, AttentionSpec], native: frozenset[nn.Module]) -> str | None:
    """Why a layer is not made of exactly the parts that the native one computes, or None."""
    name = type(layer).__name__
    parts = {child for child, _ in layer.named_children()}
    if parts != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
        return f"{name} consists of {', '.join(sorted(parts))}"
    if (reason := any_overridden(layer.modules())) is not None:
        return reason
    attention, mlp = layer.self_attn, layer.mlp
    if attention not in native:
        return f"the attention of {name} is not served by the native backend"
    for owner, wanted in (
        (attention, ("q_proj", "k_proj", "v_proj", "o_proj")),
        (mlp, ("gate_proj", "up_proj", "down_proj")),
    ):
        linears = {child: part for child, part in owner.named_children() if isinstance(part, nn.Linear)}
        others = [
            type(p).__name__
            for p in owner.children()
            if not isinstance(p, nn.Linear) and any(True for _ in p.parameters())
        ]
        columns, last = wanted[:-1], linears.get(wanted[-1])
        plain = all(type(part) is nn.Linear for child, part in linears.items() if child in columns)
        if set(linears) != set(wanted) or others or not plain or not _is_last(last):
            return f"{type(owner).__name__} has other projections than {', '.join(wanted)}"
    if type(attention.o_proj) is not type(mlp.down_proj):
        return f"ranks share only one of {name}'s halves"
    if any(getattr(mlp, part).bias is not None for part in ("gate_proj", "up_proj", "down_proj")):
        return f"{type(mlp).__name__} has biases"
    if len({getattr(attention, part).bias is None for part in ("q_proj", "k_proj", "v_proj")}) != 1:
        return f"some of the projections of {type(attention).__name__} have biases and some have none"
    spec = specs[attention]
    if spec.head_size != spec.value_size or spec.head_size % 4:
        return f"head size {spec.head_size} (values {spec.value_size}) can not be rotated by halves"
    if any(_eps(norm) is None for norm in (layer.input_layernorm, layer.post_attention_layernorm)):
        return f"{type(layer.input_layernorm).__name__} names no epsilon"
    dtypes = {parameter.dtype for parameter in layer.parameters()}
    if len(dtypes) != 1 or not dtypes <= {torch.bfloat16, torch.float32}:
        return f"{name} has weights in {', '.join(sorted(str(dtype) for dtype in dtypes))}"
    return None


def _is_last(linear: nn.Module | None) -> bool:
    """Whether a half of a layer may end in it: whole, or over this rank's part of the features."""
    return type(linear) is nn.Linear or (type(linear) is RowLinear and linear.own is None)


def _group(layer: Any) -> Group | None:
    """The ranks that share a layer's projections, if they are not whole."""
    last = layer.mlp.down_proj
    return last.group if isinstance(last, RowLinear) else None


def alone(layers: Iterable[Any]) -> AbstractContextManager[None]:
    """While this rank tries layers: those that ranks share are its own part alone."""
    group = next((group for layer in layers if (group := _group(layer)) is not None), None)
    return nullcontext() if group is None else group.alone()


def _native(layer: Any, spec: AttentionSpec) -> NativeDecoderLayer:
    group = _group(layer)
    return NativeDecoderLayer(_fuse(layer), spec, None if group is None else group.all_reduce)


def _eps(norm: nn.Module) -> float | None:
    value = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return value if isinstance(value, float) and isinstance(getattr(norm, "weight", None), nn.Parameter) else None


def _kind(layer: Any, spec: AttentionSpec) -> object:
    """Equal for layers that differ in weights and number alone: classes and plain attributes of all parts."""
    return replace(spec, layer=0), tuple(
        (name, type(part), plain_attributes(part)) for name, part in layer.named_modules()
    )


def _weights(layer: Any, fused_qkv: torch.Tensor, gate_up: torch.Tensor) -> DecoderWeights:
    """The fused tensors of a layer's projections and the rest of its weights as they are."""
    attention, mlp = layer.self_attn, layer.mlp
    qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
    input_eps, middle_eps = _eps(layer.input_layernorm), _eps(layer.post_attention_layernorm)
    assert input_eps is not None
    assert middle_eps is not None
    return DecoderWeights(
        input_norm=layer.input_layernorm.weight.data,
        input_eps=input_eps,
        qkv=fused_qkv,
        qkv_bias=None if qkv[0].bias is None else torch.cat([part.bias.data for part in qkv]),
        output=attention.o_proj.weight.data.contiguous(),
        output_bias=None if attention.o_proj.bias is None else attention.o_proj.bias.data,
        middle_norm=layer.post_attention_layernorm.weight.data,
        middle_eps=middle_eps,
        gate_up=gate_up,
        down=mlp.down_proj.weight.data.contiguous(),
    )


def _fuse(layer: Any) -> DecoderWeights:
    """A layer's weights with its projections fused; those of the layer become views, so no weight is kept twice."""
    attention, mlp = layer.self_attn, layer.mlp
    qkv = join_weights((attention.q_proj, attention.k_proj, attention.v_proj))
    gate_up = join_weights((mlp.gate_proj, mlp.up_proj))
    return _weights(layer, qkv, gate_up)


def _forward(layer: Any, native: NativeDecoderLayer, head_size: int) -> Callable[..., torch.Tensor]:
    """The layer's forward: native for a step over the paged cache, its own for anything else."""
    own = layer.forward
    attention = layer.self_attn

    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        step = kwargs.get("paged")
        positions = kwargs.get("position_embeddings")
        if not isinstance(step, PagedStep) or positions is None or hidden_states.shape[0] != 1:
            return own(hidden_states, *args, **kwargs)
        cos, sin = positions
        if cos.shape != (1, hidden_states.shape[1], head_size) or cos.dtype != hidden_states.dtype:
            return own(hidden_states, *args, **kwargs)
        bound = step.layers[attention]
        metadata = step.metadata_of(bound.group)
        return native(
            hidden_states[0].contiguous(), cos[0].contiguous(), sin[0].contiguous(), bound.cache, metadata
        ).unsqueeze(0)

    return forward


def _differs(layer: nn.Module, spec: AttentionSpec, rotary: nn.Module) -> str | None:
    """What a float32 copy of the layer and the native layer do not agree on, or None."""
    twin = _twin(layer)
    width = twin.input_layernorm.weight.shape[0]
    random = torch.Generator().manual_seed(0)
    metadata, slots = trial_metadata()
    hidden = torch.randn(1, len(slots), width, generator=random)
    cos, sin = rotary(hidden, torch.tensor([[3, 0, 1, 2, 3, 4]]))
    if cos.shape != (1, len(slots), spec.head_size):
        return f"its rotary embedding is {tuple(cos.shape)} for {len(slots)} tokens of head size {spec.head_size}"
    shape = (3, 4, spec.num_kv_heads, spec.head_size)
    one = LayerCache(torch.randn(shape, generator=random), torch.randn(shape, generator=random))
    other = LayerCache(one.key.clone(), one.value.clone())
    step = PagedStep({twin.self_attn: LayerBinding(spec, one, ReferenceBackend())}, metadata)
    try:
        expected = twin(hidden, attention_mask=None, position_embeddings=(cos, sin), use_cache=False, paged=step)
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        return f"{type(layer).__name__} does not run by itself: {error}"
    if not isinstance(expected, torch.Tensor) or expected.shape != hidden.shape:
        return f"{type(layer).__name__} does not return hidden states alone"
    given = _native(twin, spec)(hidden[0], cos[0], sin[0], other, metadata)
    for what, mine, theirs in (
        ("keys", other.key, one.key),
        ("values", other.value, one.value),
        ("output", given - hidden[0], expected[0] - hidden[0]),
    ):
        error_size = float((mine - theirs).abs().max() / theirs.abs().max().clamp(min=1e-12))
        if not error_size < _TOLERANCE:
            return (
                f"the {what} of {type(layer).__name__} differ from the native layer's by {error_size:.1e} of their size"
            )
    return None


def _twin(layer: Any) -> Any:
    """A float32 copy of a layer with its MLP cut to a few columns."""
    mlp = layer.mlp
    narrow = {part.weight: part.weight[:_COLUMNS] for part in (mlp.gate_proj, mlp.up_proj)}
    narrow[mlp.down_proj.weight] = mlp.down_proj.weight[:, :_COLUMNS]
    return float_twin(layer, narrow, (_group(layer),))


def trial_metadata() -> tuple[AttentionMetadata, torch.Tensor]:
    """A token after three cached ones, and a prompt of five, over three blocks of four."""
    slots = torch.tensor([3, 8, 9, 10, 11, 4])
    metadata = AttentionMetadata(
        query_lens=(1, 5),
        key_lens=(4, 5),
        cu_seqlens_q=torch.tensor([0, 1, 6], dtype=torch.int32),
        key_lens_tensor=torch.tensor([4, 5], dtype=torch.int32),
        block_tables=torch.tensor([[0, 0], [2, 1]], dtype=torch.int32),
        slot_mapping=slots,
        spans=((), ()),
    )
    return metadata, slots
