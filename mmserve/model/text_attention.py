"""How the text model's own attention layers reach the paged cache.

transformers looks attention functions up by name. Ours is registered once, under `NAME`, and gets all
it needs from one keyword argument, `paged`, that the model hands down from `model(...)` to each layer:
nothing is kept in a global or on the model between calls.

    model(inputs_embeds=..., paged=PagedStep) -> layer -> paged_attention(layer, q, k, v, ..., paged=step)
        -> step.layers[layer]: spec, cache, backend -> backend.attend(...)

No mask function is registered under that name, so the model builds no masks: the metadata says what
each query sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from mmserve.attention.interface import AttentionBackend, AttentionMetadata, AttentionSpec, LayerCache

__all__ = ["NAME", "LayerBinding", "PagedStep", "open_door", "register", "route", "unroute"]

NAME = "mmserve_paged"


@dataclass(frozen=True, slots=True)
class LayerBinding:
    """What serves one attention layer; `group` is the cache group whose block tables it goes by."""

    spec: AttentionSpec
    cache: LayerCache
    backend: AttentionBackend
    group: int = 0


@dataclass(frozen=True, slots=True)
class PagedStep:
    """The keyword argument of one forward pass.

    Attributes:
        layers: Each attention module of the text model and what serves it.
        metadata: How this batch lies over the cache, for the layers of cache group 0.
        text_inputs: Further arguments of the text model, put in at its door (DeepStack rows, ...).
        more_metadata: The same for groups 1, 2, ...; empty: all layers use `metadata`.
        entering: On a later pipeline stage, the rows [1, T, W] that the stage before sent.
    """

    layers: Mapping[nn.Module, LayerBinding]
    metadata: AttentionMetadata
    text_inputs: Mapping[str, Any] = field(default_factory=dict)
    more_metadata: tuple[AttentionMetadata, ...] = ()
    entering: torch.Tensor | None = None

    def metadata_of(self, group: int) -> AttentionMetadata:
        """The metadata of a cache group's layers."""
        return self.more_metadata[group - 1] if group and self.more_metadata else self.metadata


def register() -> None:
    """Make the function known to transformers under `NAME`; doing it again changes nothing."""
    AttentionInterface.register(NAME, paged_attention)


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: PagedStep,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, Dv].

    What the layer passes besides (scale, window, cap, mask) was read at load and is in its spec.
    """
    bound = paged.layers[module]
    out = bound.backend.attend(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        bound.cache,
        bound.spec,
        paged.metadata_of(bound.group),
    )
    return out.unsqueeze(0), None


def route(model: Any, name: str) -> list[tuple[Any, str]]:
    """Set the attention of the text model to `name`, and that of the outer model, which builds its masks.

    Vision towers have configs of their own and keep what they have. transformers' public setter refuses
    where a tower has attention of its own kind, so the configs are set one by one; that the layers follow
    is what the probe proves. Returns what was set before, for `unroute`.
    """
    configs = {
        id(config): config for config in (model.config, model.config.get_text_config(), model.get_decoder().config)
    }
    before = [(config, config._attn_implementation) for config in configs.values()]
    for config in configs.values():
        config._attn_implementation_internal = name
    return before


def unroute(before: list[tuple[Any, str]]) -> None:
    """Put back what `route` replaced."""
    for config, name in before:
        config._attn_implementation_internal = name


def open_door(model: Any) -> None:
    """Let the step's `text_inputs` replace what the outer model passes to its text model."""
    model.get_decoder().register_forward_pre_hook(_at_the_door, with_kwargs=True)


def _at_the_door(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {**kwargs, **kwargs["paged"].text_inputs}
