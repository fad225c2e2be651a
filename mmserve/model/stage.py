"""One pipeline stage's forward: rows come in from the stage before, and go out to the next.

What passes between two stages in a step, over the group of their column::

    rows [1, T, W]   what enters the next stage's first layer
    kind, count      of the image rows that later stages still add; only if images are placed in this step
    layers [count]   before or after which they are added, as the family has it
    extra [count, n, W]

When all have loaded, they tell each other once what their layers keep, for all go by the same block tables.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mmserve.errors import UnsupportedModelError
from mmserve.model.interface import CacheSpec, LayerCacheSpec, PackedBatch
from mmserve.parallel.group import Group
from mmserve.parallel.rank import RankShape
from mmserve.parallel.stages import HandedOver, LayerRange

__all__ = ["StageLink"]

_MOST_UNSENT = 4
"""Sends whose other side is still busy, before this one waits for it."""
_AFTER, _AFTER_MASK = "deepstack_visual_embeds", "visual_pos_masks"
"""A list: rows that are added after the first layers, one entry a layer (Qwen3-VL)."""
_BEFORE, _BEFORE_MASK = "deepstack_features", "vision_mask"
"""By number: rows that are added before some layers (Granite 4 Vision)."""
_NONE = -1
"""In place of a window, for a layer that sees all keys."""


@dataclass(frozen=True, slots=True)
class _Entering:
    """The keyword argument `paged` of a plain trial run: its rows, and nothing else."""

    entering: torch.Tensor
    text_inputs: Mapping[str, Any] = field(default_factory=dict)


class StageLink:
    """Runs a model's forward on one stage.

    Args:
        pipeline: The ranks of this column, one a stage.
        layers: This stage's.
        width: W. dtype: Of rows. device: Where they are.
    """

    def __init__(
        self, pipeline: Group, layers: LayerRange, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._pipeline = pipeline
        self._layers = layers
        self._width = width
        self._dtype = dtype
        self._device = device
        self._is_first = pipeline.rank == 0
        self._is_last = pipeline.rank == pipeline.size - 1
        self._unsent: deque[tuple[Any, torch.Tensor]] = deque()

    @staticmethod
    def of(rank: RankShape | None, table: torch.Tensor, device: torch.device) -> StageLink | None:
        """The link of a rank whose model has an embedding table like `table` [V, W]; None while there is one stage."""
        if rank is None or rank.leftovers is None:
            return None
        return StageLink(rank.pipeline, rank.leftovers.layers, table.shape[1], table.dtype, device)

    def run(
        self,
        batch: PackedBatch,
        embed: Callable[[], torch.Tensor],
        inputs: Mapping[str, Any],
        call: Callable[[torch.Tensor, Mapping[str, Any], torch.Tensor | None], torch.Tensor],
    ) -> torch.Tensor | None:
        """One step: logits on the last stage, None on others, whose rows have gone on then.

        Args:
            batch: The step's.
            embed: Makes the embeddings [T, W]; called on the first stage.
            inputs: Further arguments of the text model, as far as this stage has them.
            call: The model, over embeddings, further arguments and, on a later stage, the rows [1, T, W] that came.
        """
        if self._is_first:
            embeds, entering = embed(), None
        else:
            entering = self._receive(1, batch.token_ids.shape[0], self._width)
            # Nobody reads what is passed to the layers of earlier stages.
            embeds = torch.zeros_like(entering[0])
            if batch.placements:
                inputs = {**inputs, **self._receive_extra(batch)}
        try:
            logits = call(embeds, inputs, entering)
        except HandedOver as handed:
            self._send(handed.rows)
            if batch.placements:
                self._send_extra(inputs)
            return None
        self._check_last()
        return logits

    def run_plain(self, model: Any, input_ids: torch.Tensor, **types: torch.Tensor) -> Any:
        """A forward of the model as it is over ids and their types [1, T]: its output on the last stage, else None."""
        try:
            if self._is_first:
                output = model(input_ids=input_ids, use_cache=False, **types)
            else:
                rows = self._receive(1, input_ids.shape[1], self._width)
                output = model(inputs_embeds=torch.zeros_like(rows), use_cache=False, paged=_Entering(rows), **types)
        except HandedOver as handed:
            self._send(handed.rows)
            return None
        self._check_last()
        return output

    def _check_last(self) -> None:
        if not self._is_last:
            raise UnsupportedModelError("the model's forward went past the layer where this pipeline stage ends")

    # -- between stages -------------------------------------------------------------------------

    def _send(self, tensor: torch.Tensor) -> None:
        tensor = tensor.contiguous()
        self._unsent.append((self._pipeline.send(tensor, self._pipeline.rank + 1), tensor))
        while len(self._unsent) > _MOST_UNSENT:
            self._unsent.popleft()[0].wait()

    def _receive(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        empty = torch.empty(shape, dtype=dtype or self._dtype, device=self._device)
        return self._pipeline.receive(empty, self._pipeline.rank - 1)

    def _send_extra(self, inputs: Mapping[str, Any]) -> None:
        """Image rows of layers that are still to come."""
        stop = self._layers.stop
        if _BEFORE in inputs:  # those before layer `stop` were added on the way to its placeholder
            rows = {layer: extra for layer, extra in sorted(inputs[_BEFORE].items()) if layer > stop}
        else:
            rows = dict(list(enumerate(inputs.get(_AFTER, ())))[stop:])
        self._send(torch.tensor([_BEFORE in inputs, len(rows)], dtype=torch.int64, device=self._device))
        if rows:
            self._send(torch.tensor(list(rows), dtype=torch.int64, device=self._device))
            self._send(torch.stack([extra.to(self._dtype) for extra in rows.values()]))

    def _receive_extra(self, batch: PackedBatch) -> Mapping[str, Any]:
        before, count = self._receive(2, dtype=torch.int64).tolist()
        if not count:
            return {}
        layers = self._receive(count, dtype=torch.int64).tolist()
        targets = torch.cat([placement.targets for placement in batch.placements])
        rows = self._receive(count, targets.shape[0], self._width)
        mask = torch.zeros(1, batch.token_ids.shape[0], dtype=torch.bool, device=self._device)
        mask[0, targets] = True
        if before:
            return {_BEFORE_MASK: mask[..., None], _BEFORE: dict(zip(layers, rows, strict=True))}
        passed = [torch.zeros_like(rows[0])] * layers[0]
        return {_AFTER_MASK: mask, _AFTER: [*passed, *rows]}

    def agree(self, own: CacheSpec) -> CacheSpec:
        """This stage's cache, in the groups that all stages' layers together make; all stages call it."""
        kinds = [[layer.num_kv_heads, layer.head_size, layer.value_size, layer.window or _NONE] for layer in own.layers]
        counts = torch.cat(self._pipeline.all_gather(torch.tensor([len(kinds)], device=self._device))).tolist()
        table = torch.zeros(max(counts), 4, dtype=torch.int64, device=self._device)
        table[: len(kinds)] = torch.tensor(kinds, dtype=torch.int64, device=self._device)
        parts = zip(self._pipeline.all_gather(table), counts, strict=True)
        layers = tuple(
            LayerCacheSpec(heads, key, value, None if window == _NONE else window)
            for part, count in parts
            for heads, key, value, window in part[:count].tolist()
        )
        return replace(own, windows=CacheSpec(layers, own.dtype).layout().windows)
