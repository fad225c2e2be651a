"""What each attention layer really asks for, read from one trial run instead of from its config.

A made-up prompt of thirteen tokens with two images runs once through the loaded model, with an attention
function that only takes notes and a mask function that always builds the full mask::

    position   0 1 2 3 4 5 6 7 8 9 .. 12
    token      t t I I I I I I t t J J t

Each layer shows its heads, sizes, scale, cap and window by the arguments it passes, and its rule by the
mask it is given. The mask must equal one that an `AttentionSpec` can say (causal, window, chunk, both
ways in each image, both ways in the whole prompt); a layer whose mask does not is refused, rather than
served by a guess. Windows and chunks are set to 4 while the masks are built, so that they show, and so
does what a window does to an image longer than it. A prompt that is a prefix ends at position 8: what comes after
it is as if generated, which shows the windows that a prefix does not have.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from mmserve.attention.interface import AttentionSpec
from mmserve.attention.masks import visible
from mmserve.errors import MMServeError, UnsupportedModelError
from mmserve.model.model_config import one_line
from mmserve.model.spans import SpanRule, each_image, no_spans, whole_prompt
from mmserve.model.text_attention import route, unroute
from mmserve.model.text_inputs import find_text_inputs
from mmserve.parallel.group import ExchangeError
from mmserve.parallel.stages import HandedOver, Leftovers
from processors.types import ImageItem, PlaceholderRange, ProcessedPrompt

__all__ = ["AttentionProfile", "probe_attention"]

_NAME = "mmserve_probe"
_SMALL = 4
_LENGTH = 13
_IMAGES = (PlaceholderRange(2, 6), PlaceholderRange(10, 2))
_PROMPT = ProcessedPrompt(
    token_ids=(0,) * _LENGTH, images=tuple(ImageItem(f"{i}", range, {}, (1, 1)) for i, range in enumerate(_IMAGES))
)
_PREFIX = ProcessedPrompt(token_ids=(0,) * 8)
_HARMLESS = frozenset(
    {
        "cache_position",
        "dropout",
        "is_causal",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Arguments of an attention call that change nothing in inference, or that the mask says."""
_LAYER_KINDS = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})
"""Layers of other kinds may change their rule after the prompt, which a trial prompt does not show."""
_ROPE_BY_LENGTH = frozenset({"dynamic", "longrope"})


@dataclass(frozen=True, slots=True)
class AttentionProfile:
    """The attention layers of a text model in the order they run, and which parts of a prompt attend both ways."""

    specs: Mapping[nn.Module, AttentionSpec]
    span_rule: SpanRule


@dataclass(slots=True)
class _Call:
    """One layer's call: its spec as far as its arguments say it, and its mask [T, T]."""

    spec: AttentionSpec
    mask: torch.Tensor


@dataclass(slots=True)
class _Notes:
    """The keyword argument of a trial run: each layer's call, and the distinct keys, one a cache.

    A layer that is handed the very keys of an earlier one shares its cache (Gemma 3n).
    """

    calls: dict[nn.Module, _Call] = field(default_factory=dict)
    keys: list[torch.Tensor] = field(default_factory=list)
    text_inputs: Mapping[str, Any] = field(default_factory=dict)


def probe_attention(model: Any, stage: Leftovers | None = None) -> AttentionProfile:
    """Run the trial on a loaded model, which is left as it was; on its own layers alone if it is a pipeline stage.

    Raises:
        UnsupportedModelError: A layer's mask or arguments are not among those that a spec can say, or the
            layers do not go through transformers' attention interface.
    """
    _check_kinds(model)
    AttentionInterface.register(_NAME, _take_notes)
    AttentionMaskInterface.register(_NAME, _full_mask)
    before = route(model, _NAME)
    try:
        types = [int(any(place.offset <= i < place.end for place in _IMAGES)) for i in range(_LENGTH)]
        profile = _match(model, _trial(model, types, stage), (no_spans, each_image), _PROMPT)
        if profile is None:
            # PaliGemma's prefix is what has type 0, images included.
            prefix = len(_PREFIX.token_ids)
            types = [0] * prefix + [1] * (_LENGTH - prefix)
            profile = _match(model, _trial(model, types, stage), (whole_prompt,), _PREFIX)
    finally:
        unroute(before)
    if profile is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} attends by a mask that is neither causal, windowed, chunked, nor both ways "
            "within images or the prompt"
        )
    return profile


def _check_kinds(model: Any) -> None:
    """Raise UnsupportedModelError for what a short trial would not show."""
    text_config = model.config.get_text_config()
    kinds = set(getattr(text_config, "layer_types", None) or ()) - _LAYER_KINDS
    if kinds:
        raise UnsupportedModelError(f"{type(model).__name__} has layers of kind {', '.join(sorted(kinds))}")
    rope = getattr(text_config, "rope_parameters", None) or {}
    types = {str(part.get("rope_type")) for part in (rope, *rope.values()) if isinstance(part, dict)}
    if types & _ROPE_BY_LENGTH:
        raise UnsupportedModelError(
            f"{type(model).__name__} rotates by {', '.join(sorted(types & _ROPE_BY_LENGTH))} frequencies, which "
            "depend on the longest sequence of a batch"
        )


@torch.inference_mode()
def _trial(model: Any, token_types: list[int], stage: Leftovers | None) -> dict[nn.Module, _Call]:
    device = next(model.parameters()).device
    types = torch.tensor([token_types], device=device)
    accepted = inspect.signature(model.forward).parameters
    extra = {name: types for name in ("token_type_ids", "mm_token_type_ids") if name in accepted}
    notes = _Notes()
    table = model.get_input_embeddings()
    if stage is None or stage.layers.start == 0:
        embeds = table(torch.zeros_like(types))
    else:
        embeds = torch.zeros(1, _LENGTH, table.weight.shape[1], dtype=table.weight.dtype, device=device)
    more = find_text_inputs(model).outer(torch.zeros_like(types[0]), None)
    positions = torch.arange(_LENGTH, device=device)[None]
    try:
        with _small_windows(model), suppress(HandedOver):
            model(inputs_embeds=embeds, position_ids=positions, use_cache=False, paged=notes, **more, **extra)
    except (MMServeError, ExchangeError):
        raise
    except Exception as error:  # the model's own code, on input that it may not be made for
        raise UnsupportedModelError(
            f"{type(model).__name__} does not run on embeddings alone: {one_line(error)}"
        ) from error
    expected = model.config.get_text_config().num_hidden_layers
    if stage is not None:
        expected = stage.layers.stop - stage.layers.start
    if len(notes.calls) != expected:
        raise UnsupportedModelError(
            f"{len(notes.calls)} of the {expected} text layers of {type(model).__name__} go through the attention "
            "interface; the others keep state of another kind"
        )
    return notes.calls


@contextmanager
def _small_windows(model: Any) -> Iterator[None]:
    """Windows and chunks of 4 while masks are built; layers keep the size that they read at construction.

    Set on every config that a module holds: a text model may have been given a copy of the outer one's.
    """
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    sizes = [
        (config, name, getattr(config, name))
        for config in configs.values()
        for name in ("sliding_window", "attention_chunk_size")
        if isinstance(getattr(config, name, None), int)
    ]
    try:
        for config, name, _ in sizes:
            setattr(config, name, _SMALL)
        yield
    finally:
        for config, name, size in sizes:
            setattr(config, name, size)


def _full_mask(*args: Any, **kwargs: Any) -> torch.Tensor:
    """transformers' boolean mask, built even where a kernel would not need it."""
    kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    mask: torch.Tensor = sdpa_mask(*args, **kwargs)
    return mask


def _take_notes(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    paged: _Notes | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Notes the call and answers zeros [1, T, H, Dv]."""
    name = type(module).__name__
    if paged is None:
        raise UnsupportedModelError(f"the model does not hand keyword arguments down to {name}")
    unknown = sorted(key for key, given in kwargs.items() if given is not None and key not in _HARMLESS)
    if unknown:
        raise UnsupportedModelError(f"{name} gives its attention {', '.join(unknown)}, which no backend knows")
    if attention_mask is None or attention_mask.shape != (1, 1, _LENGTH, _LENGTH):
        raise UnsupportedModelError(f"{name} builds its mask in a way of its own")
    cache = next((i for i, known in enumerate(paged.keys) if known is key), len(paged.keys))
    if cache == len(paged.keys):
        paged.keys.append(key)
    spec = AttentionSpec(
        layer=cache,
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_size=query.shape[-1],
        value_size=value.shape[-1],
        scale=float(scaling) if scaling is not None else query.shape[-1] ** -0.5,
        window=sliding_window,
        soft_cap=softcap,
        sinks=s_aux,
    )
    mask = attention_mask if attention_mask.dtype == torch.bool else attention_mask >= 0
    paged.calls[module] = _Call(spec, mask[0, 0])
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None


def _match(
    model: Any, calls: Mapping[nn.Module, _Call], rules: tuple[SpanRule, ...], prompt: ProcessedPrompt
) -> AttentionProfile | None:
    """The first rule under which every layer's mask over `prompt` is one that a spec can say."""
    for rule in rules:
        specs = {module: _matching_spec(model, call, rule(prompt)) for module, call in calls.items()}
        found = {module: spec for module, spec in specs.items() if spec is not None}
        if len(found) == len(calls):
            return AttentionProfile(found, rule)
    return None


def _matching_spec(model: Any, call: _Call, spans: tuple[tuple[int, int], ...]) -> AttentionSpec | None:
    """The layer's spec with its real window or chunk, if its mask is the one that spec makes."""
    text_config = model.config.get_text_config()
    positions = torch.arange(_LENGTH, device=call.mask.device)
    for window, chunk, cuts, both in itertools.product((None, _SMALL), (None, _SMALL), (False, True), (True, False)):
        trial = replace(call.spec, window=window, chunk=chunk, window_cuts_spans=cuts, both_ways=both)
        if torch.equal(call.mask, visible(positions, positions, trial, spans)):
            return replace(
                trial,
                window=text_config.sliding_window if window else None,
                chunk=text_config.attention_chunk_size if chunk else None,
            )
    return None
