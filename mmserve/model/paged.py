"""A transformers model over a paged cache: packed batches of many requests in one forward pass.

The model's own forward runs, once, over `[1, T]`: its embedding of the text, its positions, its layers,
its head with the scale and caps it has. What differs from plain transformers comes in through three
doors: embeddings with the image rows already in place, an attention function that reads the paged
cache, and the indices of the positions whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mmserve.attention.interface import AttentionSpec, LayerCache
from mmserve.attention.registry import BackendChoice
from mmserve.errors import EngineError, InputError, UnsupportedModelError
from mmserve.model.image_rows import ImageEncoder, merge_extra
from mmserve.model.interface import CacheSpec, ImageRows, LayerCacheSpec, PackedBatch, PromptPlan
from mmserve.model.positions import find_rope_index, mrope_positions, plain_positions
from mmserve.model.spans import SpanRule
from mmserve.model.stage import StageLink
from mmserve.model.text_attention import LayerBinding, PagedStep
from processors.types import ImageItem, ProcessedPrompt

__all__ = ["PagedLayer", "PagedModel"]


@dataclass(frozen=True, slots=True)
class PagedLayer:
    """One attention module of the text model, what it asks for, and what was chosen to serve it."""

    module: nn.Module
    spec: AttentionSpec
    choice: BackendChoice


class PagedModel:
    """The `Model` of `mmserve.model.interface` over a transformers model."""

    needs_sequences = False

    def __init__(
        self,
        model: Any,
        layers: Sequence[PagedLayer],
        encoder: ImageEncoder | None,
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
        self._embed_tokens: Any = self._model.get_input_embeddings()
        # Of a table that is dealt to ranks, the weight is a part.
        self._num_embeddings: int = getattr(self._embed_tokens, "num_embeddings", self._embed_tokens.weight.shape[0])
        self._rope_index = find_rope_index(model)
        self._bindings: Mapping[nn.Module, LayerBinding] = {}

    def cache_spec(self) -> CacheSpec:
        """The cache that the engine must provide."""
        shapes = {}
        for layer in self._layers:
            spec = layer.spec
            shapes[spec.layer] = LayerCacheSpec(spec.num_kv_heads, spec.head_size, spec.value_size, spec.window)
        return CacheSpec(
            layers=tuple(shapes[index] for index in sorted(shapes)),
            dtype=self._embed_tokens.weight.dtype,
        )

    def bind_cache(self, caches: Sequence[LayerCache]) -> None:
        """Take the cache tensors, one per entry of `cache_spec().layers`, before the first forward."""
        expected = len(self.cache_spec().layers)
        if len(caches) != expected:
            raise EngineError(f"{len(caches)} caches were given to a model that keeps {expected}")
        self._bindings = {
            layer.module: LayerBinding(layer.spec, caches[layer.spec.layer], layer.choice.backend)
            for layer in self._layers
        }

    def plan(self, prompt: ProcessedPrompt) -> PromptPlan:
        """Positions and both-way spans of a whole prompt.

        Raises:
            InputError: An id outside the images is not in the embedding table, the prompt has images and
                the model takes none, or the images do not fit their ranges.
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
        if self._stage is None:
            output = self._call(batch, self._embed(batch), _text_inputs(batch), None)
        else:
            output = self._stage.run(batch, self._embed, _text_inputs, self._call)
        if output is None:
            return torch.empty(0, self.vocab_size)
        logits: torch.Tensor = output.logits[0]
        if logits.shape[0] != batch.logit_indices.shape[0]:
            # A few families take no logits_to_keep and compute them all.
            logits = logits[batch.logit_indices]
        return logits.float()

    def _call(
        self, batch: PackedBatch, embeds: torch.Tensor, text_inputs: Mapping[str, Any], entering: torch.Tensor | None
    ) -> Any:
        positions = batch.positions[:, None]
        return self._model(
            inputs_embeds=embeds[None],
            position_ids=positions[0] if self._rope_index is None else positions,
            use_cache=False,
            logits_to_keep=batch.logit_indices,
            paged=PagedStep(self._bindings, batch.attention, text_inputs, entering),
        )

    def release(self, request_ids: Sequence[str]) -> None:
        """Nothing of a request is kept here."""

    def describe(self) -> Mapping[str, object]:
        """What was loaded, and which paths were chosen and why; JSON-friendly."""
        return self._about

    def _embed(self, batch: PackedBatch) -> torch.Tensor:
        """Embeddings [T, W] with the image rows in place.

        Ids at image positions are replaced before the lookup: they may lie outside the table. The
        model's own embedding is called, so a scale on text embeddings stays on text alone.
        """
        token_ids = batch.token_ids
        if not batch.placements:
            plain: torch.Tensor = self._embed_tokens(token_ids)
            return plain
        targets = torch.cat([placement.targets for placement in batch.placements])
        rows = torch.cat([p.image.rows[p.first : p.first + p.targets.shape[0]] for p in batch.placements])
        embeds: torch.Tensor = self._embed_tokens(token_ids.index_fill(0, targets, 0))
        return embeds.index_copy(0, targets, rows.to(embeds.dtype))

    def _check(self, prompt: ProcessedPrompt) -> None:
        if prompt.images and self._encoder is None:
            raise InputError("this model takes no images")
        covered = {position for image in prompt.images for position in image.range.embed_positions()}
        for position, token in enumerate(prompt.token_ids):
            if not 0 <= token < self._num_embeddings and position not in covered:
                raise InputError(
                    f"token {token} at index {position} is not in the model's table of "
                    f"{self._num_embeddings} embeddings, and no image stands there"
                )


def _text_inputs(batch: PackedBatch) -> Mapping[str, Any]:
    """What goes to the text model besides embeddings: DeepStack rows and the mask of where they go."""
    placed = [(p.image.extra, p.first, p.targets.shape[0]) for p in batch.placements if p.image.extra]
    if not placed:
        return {}
    mask = torch.zeros(1, batch.token_ids.shape[0], dtype=torch.bool, device=batch.token_ids.device)
    targets = torch.cat([p.targets for p in batch.placements if p.image.extra])
    mask[0, targets] = True
    # The model reads the rows in the order of the mask, which is that of the packed batch.
    rows = merge_extra(placed, "deepstack")[:, torch.argsort(targets)]
    return {"visual_pos_masks": mask, "deepstack_visual_embeds": list(rows)}
