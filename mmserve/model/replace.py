"""Faster layers in place of a loaded model's own, each only where it gives what the original gives.

Three kinds, all on the CPU and only where the kernels are compiled:

    decoder layers    of the Llama kind, each as one native call (`replace_decoder`), then all in one (`replace_stack`)
    linear layers     of the text model, products of few rows (`mmserve.kernels.linear`)
    vision towers     attention, activation, one tile at a time (`replace_tower`)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mmserve.attention.interface import AttentionSpec
from mmserve.kernels.library import status
from mmserve.kernels.linear import FewRowLinear
from mmserve.model.replace_decoder import replace_decoder_layers
from mmserve.model.replace_stack import replace_stack
from mmserve.model.replace_tower import replace_tower

__all__ = ["Replacement", "replace_layers"]


@dataclass(frozen=True, slots=True)
class Replacement:
    """What was replaced, how often, or why it was not."""

    what: str
    count: int
    declined: str | None = None

    def describe(self) -> dict[str, object]:
        """JSON-friendly."""
        return {"what": self.what, "count": self.count, "declined": self.declined}


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
    layers, reason = replace_decoder_layers(model, specs, native)
    stacked = []
    if layers:
        why_not = replace_stack(model, layers)
        stacked.append(Replacement("all decoder layers in one call", 0 if why_not else 1, why_not))
    linears = [module for module in _text_linears(model) if FewRowLinear.declines(module) is None]
    for linear in linears:
        FewRowLinear.take_over(linear)
    return (
        Replacement("decoder layers as one native call", len(layers), reason),
        *stacked,
        Replacement("linear layers of the text model", len(linears), None if linears else "none is a plain Linear"),
        *(Replacement(what, count, why) for what, count, why in replace_tower(model)),
    )


def _text_linears(model: Any) -> list[nn.Linear]:
    """Plain linear layers of the text model and the output head."""
    found = [module for module in model.get_decoder().modules() if isinstance(module, nn.Linear)]
    head = model.get_output_embeddings()
    return [*found, head] if isinstance(head, nn.Linear) and head not in found else found
