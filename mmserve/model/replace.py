"""Faster layers in place of a loaded model's own, each only where it gives what the original gives.

Four kinds, all on the CPU and only where the kernels are compiled:

    decoder layers    of the Llama kind, each as one native call (`replace_decoder`), then all in one (`replace_stack`)
    RMS norms         in their three forms (`replace_norm`)
    linear layers     of the text model, their products (`mmserve.kernels.linear`), a rank's part of one too
    vision towers     whole layers (`replace_encoder`), else attention and activation; by tiles (`replace_tower`)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mmserve.attention.interface import AttentionSpec
from mmserve.kernels.decoder import NativeDecoderLayer
from mmserve.kernels.library import kernels, status
from mmserve.kernels.linear import FewRowLinear, weight_declines, weight_product
from mmserve.model.replace_checks import overridden, pattern_of
from mmserve.model.replace_decoder import replace_decoder_layers
from mmserve.model.replace_norm import replace_norms
from mmserve.model.replace_stack import replace_stack
from mmserve.model.replace_tower import replace_tower
from mmserve.parallel.layers import ExchangedLinear

__all__ = ["Replacement", "replace_layers"]


@dataclass(frozen=True, slots=True)
class Replacement:
    """What was replaced and what was left alone.

    Attributes:
        what: The kind of layer. count: How many were replaced.
        declined: Why one was not, the first reason if there are several.
        left_alone: Name of a module, `*` for its layer's number -> why it stays.
    """

    what: str
    count: int
    declined: str | None = None
    left_alone: Mapping[str, str] = field(default_factory=dict)

    def describe(self) -> dict[str, object]:
        """JSON-friendly."""
        return {
            "what": self.what,
            "count": self.count,
            "declined": self.declined,
            "left_alone": dict(self.left_alone),
        }


@torch.inference_mode()
def replace_layers(
    model: Any, specs: Mapping[nn.Module, AttentionSpec], native: frozenset[nn.Module]
) -> tuple[Replacement, ...]:
    """Replace what can be, in place.

    Args:
        model: A loaded transformers model whose text attention is routed to the paged cache.
        specs: Each attention module of the text model and what it asks for.
        native: Those of them that the native backend serves.
    """
    parameter = next(model.parameters())
    if parameter.device.type != "cpu":
        return (Replacement("layers", 0, f"the kernels run on the CPU, and the model is on {parameter.device.type}"),)
    state = status()
    if not state.native:
        return (Replacement("layers", 0, f"the kernels are not compiled: {state.reason}"),)
    names = {module: name for name, module in model.named_modules()}
    taken, left = replace_decoder_layers(model, specs, native)
    return (
        _account(_decoder_label(taken), len(taken), ((names.get(m, "layers"), r) for m, r in left)),
        *_stack(model, taken),
        *_norms(model, frozenset(taken)),
        _linears(model, names),
        *(Replacement(what, count, why) for what, count, why in replace_tower(model)),
    )


def _decoder_label(layers: Mapping[nn.Module, NativeDecoderLayer]) -> str:
    shared = any(layer.total is not None for layer in layers.values())
    return "decoder layers as two native calls, a sum after each" if shared else "decoder layers as one native call"


def _account(what: str, count: int, left: Iterable[tuple[str, str]]) -> Replacement:
    reasons: dict[str, str] = {}
    for name, reason in left:
        reasons.setdefault(pattern_of(name), reason)
    return Replacement(what, count, next(iter(reasons.values()), None), reasons)


def _stack(model: Any, layers: Mapping[nn.Module, NativeDecoderLayer]) -> list[Replacement]:
    if not layers:
        return []
    why_not = replace_stack(model, layers)
    return [Replacement("all decoder layers in one call", 0 if why_not else 1, why_not)]


def _norms(model: Any, done: frozenset[nn.Module]) -> list[Replacement]:
    """One entry a form that was found, and those that stay in the first."""
    counts: dict[str, int] = {}
    left = []
    for name, form, reason in replace_norms(model, done):
        if reason is None:
            counts[form] = counts.get(form, 0) + 1
        else:
            left.append((name, reason))
    entries = [_account(f"RMS norms, {form}", count, ()) for form, count in sorted(counts.items())]
    return [*entries, _account("RMS norms", 0, left)] if left else entries


def _linears(model: Any, names: Mapping[nn.Module, str]) -> Replacement:
    """Linear layers of the text model and the output head."""
    tried: dict[object, str | None] = {}
    left = []
    count = 0
    for linear in _text_linears(model):
        exchanged = linear if isinstance(linear, ExchangedLinear) else None
        reason = (weight_declines(linear.weight) if exchanged else FewRowLinear.declines(linear)) or overridden(linear)
        if reason is None:
            kind = (linear.weight.shape, linear.weight.dtype, linear.bias is None)
            if kind not in tried:
                tried[kind] = _linear_differs(linear)
            reason = tried[kind]
        if reason is not None:
            left.append((names[linear], reason))
            continue
        if exchanged:
            exchanged.product = weight_product
        else:
            FewRowLinear.take_over(linear)
        count += 1
    return _account("linear layers of the text model", count, left)


def _text_linears(model: Any) -> list[nn.Linear]:
    """Linear layers, subclasses too, of the text model and the output head."""
    found = [module for module in model.get_decoder().modules() if isinstance(module, nn.Linear)]
    head = model.get_output_embeddings()
    return [*found, head] if isinstance(head, nn.Linear) and head not in found else found


def _linear_differs(linear: nn.Linear) -> str | None:
    """What the kernel and torch do not agree on, for three random rows, or None."""
    x = torch.randn(3, linear.in_features, generator=torch.Generator().manual_seed(0)).to(linear.weight.dtype)
    expected = F.linear(x, linear.weight, linear.bias).float()
    given = kernels().linear(x, linear.weight, linear.bias, None).float()
    difference = float((given - expected).norm() / expected.norm().clamp(min=1e-30))
    most = 1e-5 if linear.weight.dtype == torch.float32 else 2e-2
    return None if difference <= most else f"the kernel's product differs by {difference:.1e} of its size"
