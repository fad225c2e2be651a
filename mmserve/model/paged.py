"""A transformers model over a paged cache: packed batches of many requests in one forward pass.

The model's own forward runs, once, over `[1, T]`: its embedding of the text, its positions, its layers,
its head with the scale and caps it has. What differs from plain transformers comes in through three
doors: embeddings with the image rows already in place, an attention function that reads the paged
cache, and the indices of the positions whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mmserve.attention.interface import AttentionSpec, LayerCache
from mmserve.attention.registry import BackendChoice
from mmserve.errors import EngineError, InputError, UnsupportedModelError
from mmserve.model.image_rows import ImageEncoder
from mmserve.model.interface import CacheSpec, ImageRows, LayerCacheSpec, PackedBatch, PromptPlan
from mmserve.model.known_ids import check_known_ids
from mmserve.model.positions import find_rope_index, mrope_positions, plain_positions
from mmserve.model.spans import SpanRule
from mmserve.model.spread_encoding import SpreadEncoder
from mmserve.model.stage import StageLink
from mmserve.model.text_attention import LayerBinding, PagedStep
from mmserve.model.text_inputs import find_text_inputs
from processors.types import ImageItem, ProcessedPrompt

__all__ = ["PagedLayer", "PagedModel"]


@dataclass(frozen=True, slots=True)
class PagedLayer:
    """One attention module of the text model, what it asks for, and what was chosen to serve it."""

    module: nn.Module
    spec: AttentionSpec
    choice: BackendChoice


_Forward = Callable[[torch.Tensor, torch.Tensor, PagedStep, torch.Tensor, Mapping[str, Any]], torch.Tensor]
"""embeds [1, T, W], position ids, step, indices int64 [M], further arguments of the outer model -> logits [M, V]"""


def _whole_model(model: Any) -> _Forward:
    def run(
        embeds: torch.Tensor,
        position_ids: torch.Tensor,
        step: PagedStep,
        wanted: torch.Tensor,
        more: Mapping[str, Any],
    ) -> torch.Tensor:
        output = model(
            inputs_embeds=embeds, position_ids=position_ids, use_cache=False, logits_to_keep=wanted, paged=step, **more
        )
        logits: torch.Tensor = output.logits[0]
        # A few families take no logits_to_keep and compute them all.
        return logits if logits.shape[0] == wanted.shape[0] else logits[wanted]

    return run


def _decoder_and_head(model: Any) -> _Forward:
    decoder, head = model.get_decoder(), model.get_output_embeddings()

    def run(
        embeds: torch.Tensor, position_ids: torch.Tensor, step: PagedStep, wanted: torch.Tensor, _: Mapping[str, Any]
    ) -> torch.Tensor:
        output = decoder(inputs_embeds=embeds, position_ids=position_ids, use_cache=False, paged=step)
        logits: torch.Tensor = head(output.last_hidden_state[0, wanted])
        return logits

    return run


class PagedModel:
    """The `Model` of `mmserve.model.interface` over a transformers model."""

    needs_sequences = False

    def __init__(
        self,
        model: Any,
        layers: Sequence[PagedLayer],
        encoder: ImageEncoder | SpreadEncoder | None,
        span_rule: SpanRule,
        *,
        vocab_size: int,
        forbidden_token_ids: tuple[int, ...],
        max_position: int | None,
        about: Mapping[str, object],
        stage: StageLink | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.forbidden_token_ids = forbidden_token_ids
        self.max_position = max_position
        self._model = model
        self._layers = tuple(layers)
        self._encoder = encoder
        self._span_rule = span_rule
        self._about = about
        self._stage = stage
        self._windows: tuple[int | None, ...] | None = None
        self._embed_tokens: Any = self._model.get_input_embeddings()
        # Of a table that is dealt to ranks, the weight is a part.
        self._num_embeddings: int = getattr(self._embed_tokens, "num_embeddings", self._embed_tokens.weight.shape[0])
        self._rope_index = find_rope_index(model)
        self._text_inputs = find_text_inputs(model)
        self._bindings: Mapping[nn.Module, LayerBinding] = {}
        self._run: _Forward = _whole_model(model)
        self._forward_note = "the whole model"

    def cache_spec(self) -> CacheSpec:
        """The cache that the engine must provide."""
        shapes: dict[int, LayerCacheSpec] = {}
        for layer in self._layers:
            spec = layer.spec
            window = self._reach(spec)
            if spec.layer in shapes:  # layers that share a cache
                window = _farther(window, shapes[spec.layer].window)
            shapes[spec.layer] = LayerCacheSpec(spec.num_kv_heads, spec.head_size, spec.value_size, window)
        return CacheSpec(
            layers=tuple(shapes[index] for index in sorted(shapes)),
            dtype=self._embed_tokens.weight.dtype,
            windows=self._windows,
        )

    def share_cache_groups(self) -> None:
        """On a pipeline stage, once, before a cache is bound: agree with the others on the groups of blocks."""
        if self._stage is not None:
            self._windows = self._stage.agree(self.cache_spec()).windows

    def bind_cache(self, caches: Sequence[LayerCache]) -> None:
        """Take the cache tensors, one per entry of `cache_spec().layers`, before the first forward."""
        expected = len(self.cache_spec().layers)
        if len(caches) != expected:
            raise EngineError(f"{len(caches)} caches were given to a model that keeps {expected}")
        places = self.cache_spec().layout().places
        self._bindings = {
            layer.module: LayerBinding(
                layer.spec, caches[layer.spec.layer], layer.choice.backend, places[layer.spec.layer][0]
            )
            for layer in self._layers
        }

    def unbind_cache(self, caches: Sequence[LayerCache]) -> None:
        """Let go of these cache tensors; if others have been bound since, those stay."""
        gone = {id(cache) for cache in caches}
        if all(id(binding.cache) in gone for binding in self._bindings.values()):
            self._bindings = {}

    def plan(self, prompt: ProcessedPrompt) -> PromptPlan:
        """Positions and both-way spans of a whole prompt.

        Raises:
            InputError: An id outside the images is not in the embedding table, the prompt has images and
                the model takes none, the images do not fit their ranges, or rows that were given in place of a
                picture do not fit the model.
        """
        self._check(prompt)
        spans = self._span_rule(prompt)
        if self._rope_index is None:
            return PromptPlan(positions=plain_positions(prompt), spans=spans)
        positions, delta = mrope_positions(self._rope_index, prompt)
        return PromptPlan(positions=positions, delta=delta, spans=spans)

    def encode(self, images: Sequence[ImageItem]) -> list[ImageRows | Exception]:
        """Encode each image by itself; an image that fails yields its error and harms no other."""
        if self._encoder is None:
            raise UnsupportedModelError("this model takes no images")
        return self._encoder(images)

    @torch.inference_mode()
    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Logits float32 [M, V] of `batch.logit_indices`, after the model's own scale and caps.

        On a pipeline stage that is not the last there are none: [0, V].
        """
        targets = torch.cat([p.targets for p in batch.placements]) if batch.placements else None
        at_the_door = self._text_inputs.at_the_door(batch)
        if self._stage is None:
            return self._call(batch, targets, self._embed(batch, targets), at_the_door, None).float()
        logits = self._stage.run(
            batch,
            lambda: self._embed(batch, targets),
            at_the_door,
            lambda embeds, inputs, entering: self._call(batch, targets, embeds, inputs, entering),
        )
        return torch.empty(0, self.vocab_size) if logits is None else logits.float()

    def _call(
        self,
        batch: PackedBatch,
        targets: torch.Tensor | None,
        embeds: torch.Tensor,
        at_the_door: Mapping[str, Any],
        entering: torch.Tensor | None,
    ) -> torch.Tensor:
        positions = batch.positions[:, None]
        return self._run(
            embeds[None],
            positions[0] if self._rope_index is None else positions,
            PagedStep(self._bindings, batch.attention, at_the_door, batch.more_attention, entering),
            batch.logit_indices,
            self._text_inputs.outer(batch.token_ids, targets),
        )

    @torch.inference_mode()
    def skip_outer_modules(self, trials: Sequence[PackedBatch], expected: Sequence[torch.Tensor]) -> None:
        """From now on call the text model and the head alone, if that gives the same bits; `describe` says which.

        What a multimodal model's own forward adds to them, once embeddings are made, is bookkeeping in most
        families. Those that scale or cap logits, or feed layers on more than embeddings, differ and stay.

        Args:
            trials: Batches of text, over a cache that is bound. expected: What `forward` gave for each.
        """
        if self._text_inputs.takes_more:
            self._forward_note = "the whole model: its text model takes more than embeddings"
            return
        whole, self._run = self._run, _decoder_and_head(self._model)
        try:
            same = all(torch.equal(self.forward(t), logits) for t, logits in zip(trials, expected, strict=True))
            reason = None if same else "it does more than call its text model and head"
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            reason = f"its text model does not run by itself: {type(error).__name__}: {error}"
        if reason is None:
            self._forward_note = "text model and head, which give the same bits as the whole model"
        else:
            self._run = whole
            self._forward_note = f"the whole model: {reason}"

    def release(self, request_ids: Sequence[str]) -> None:
        """Nothing of a request is kept here."""

    def describe(self) -> Mapping[str, object]:
        """What was loaded, and which paths were chosen and why; JSON-friendly."""
        return {**self._about, "forward": self._forward_note}

    def _reach(self, spec: AttentionSpec) -> int | None:
        """How many keys back a layer looks, itself included; None: as far as there are any."""
        # A query sees keys of its own chunk only, so no more than a chunk back; a both-way span lies within a step.
        limits = [limit for limit in (spec.window, spec.chunk) if limit is not None]
        reach = min(limits, default=None)
        return None if reach is None or (self.max_position is not None and reach >= self.max_position) else reach

    def _embed(self, batch: PackedBatch, targets: torch.Tensor | None) -> torch.Tensor:
        """Embeddings [T, W] with the image rows in place at `targets`.

        Ids at image positions are replaced before the lookup: they may lie outside the table. The
        model's own embedding is called, so a scale on text embeddings stays on text alone.
        """
        token_ids = batch.token_ids
        if targets is None:
            return self._text_inputs.embed(token_ids)
        rows = torch.cat([p.image.rows[p.first : p.first + p.targets.shape[0]] for p in batch.placements])
        embeds = self._text_inputs.embed(token_ids.index_fill(0, targets, 0))
        return embeds.index_copy(0, targets, rows.to(embeds.dtype))

    def _check(self, prompt: ProcessedPrompt) -> None:
        if prompt.images and self._encoder is None:
            raise InputError("this model takes no images")
        for image in prompt.images:
            if image.features is not None and self._encoder is not None:
                self._encoder.check_given(image.features)
        check_known_ids(prompt, self._num_embeddings)


def _farther(one: int | None, other: int | None) -> int | None:
    """The farther of two reaches, of layers that share a cache."""
    return None if one is None or other is None else max(one, other)
