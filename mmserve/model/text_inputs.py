"""What some text models take of a packed batch besides embeddings and positions, found by the names they ask for.

visual_pos_masks, deepstack_visual_embeds   image rows added after the first layers (Qwen3-VL)
vision_mask, deepstack_features             image rows added before layers of given numbers (Granite 4 Vision)
moe_mm_token_type_ids                       which tokens go to the experts for images (Ernie 4.5 VL)
per_layer_inputs                            a second embedding of the ids, for every layer (Gemma 3n, Gemma 4)
embed_vision, embed_audio                   tables of their own for ids that stand around images and sounds (Gemma 3n)
logits_to_keep                              0: a text model that drops positions itself would drop them from the
                                            cache too; the outer model does it after the last layer
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mmserve.model.image_rows import LAYER_PREFIX, merge_extra
from mmserve.model.interface import PackedBatch, RowPlacement

__all__ = ["TextInputs", "find_text_inputs"]


@dataclass(frozen=True, slots=True)
class TextInputs:
    """The arguments beyond the usual that one model's text part takes.

    Attributes:
        decoder: The text model. names: Parameters of its forward and of its layers' that are served here.
        pad: The id that stands for an image where ids are embedded a second time.
        table: The text model's embedding. others: Modules that embed `vocab_size` ids from `vocab_offset` on.
    """

    decoder: Any
    names: frozenset[str]
    pad: int
    table: Any
    others: tuple[Any, ...] = ()

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings [T, W] of ids [T] that are text, each from the table that the model has for it."""
        embeds: torch.Tensor = self.table(token_ids)
        for other in self.others:
            where = (token_ids >= other.vocab_offset) & (token_ids < other.vocab_offset + other.vocab_size)
            (places,) = where.nonzero(as_tuple=True)
            if len(places):
                embeds = embeds.index_copy(0, places, other(input_ids=token_ids[places]).to(embeds.dtype))
        return embeds

    @property
    def takes_more(self) -> bool:
        """Whether the outer model hands the text model anything that `outer` has to make."""
        return bool(self.names - {"logits_to_keep"})

    def outer(self, token_ids: torch.Tensor, targets: torch.Tensor | None) -> Mapping[str, Any]:
        """Arguments of the outer model, which hands them down: token_ids [T], targets [n] of image rows or None."""
        more: dict[str, Any] = {}
        if "per_layer_inputs" in self.names:
            ids = token_ids if targets is None else token_ids.index_fill(0, targets, self.pad)
            more["per_layer_inputs"] = self.decoder.get_per_layer_inputs(ids[None])
        if "moe_mm_token_type_ids" in self.names and targets is not None:
            more["moe_mm_token_type_ids"] = torch.zeros_like(token_ids).index_fill_(0, targets, 1)[None]
        return more

    def at_the_door(self, batch: PackedBatch) -> Mapping[str, Any]:
        """Arguments of the text model that the outer model would make from ids, or sets to something else."""
        more: dict[str, Any] = {"logits_to_keep": 0} if "logits_to_keep" in self.names else {}
        placed = [placement for placement in batch.placements if placement.image.extra]
        if placed:
            more.update(_extra_rows(placed, batch.token_ids))
        return more


def find_text_inputs(model: Any) -> TextInputs:
    """What `model` takes beyond the usual."""
    decoder = model.get_decoder()
    taken = set(inspect.signature(decoder.forward).parameters)
    names = {"moe_mm_token_type_ids", "logits_to_keep"} & taken
    if getattr(decoder, "hidden_size_per_layer_input", 0) and "per_layer_inputs" in taken:
        names.add("per_layer_inputs")
    pad = getattr(model.config.get_text_config(), "pad_token_id", None)
    embedders = [getattr(getattr(model, "model", None), name, None) for name in ("embed_vision", "embed_audio")]
    others = tuple(each for each in embedders if hasattr(each, "vocab_offset"))
    return TextInputs(decoder, frozenset(names), int(pad or 0), model.get_input_embeddings(), others)


def _extra_rows(placed: Sequence[RowPlacement], token_ids: torch.Tensor) -> Mapping[str, Any]:
    targets = torch.cat([placement.targets for placement in placed])
    mask = torch.zeros(1, token_ids.shape[0], dtype=torch.bool, device=token_ids.device)
    mask[0, targets] = True
    # The model reads the rows in the order of the mask, which is that of the packed batch.
    order = torch.argsort(targets)
    parts = [(p.image.extra, p.first, p.targets.shape[0]) for p in placed]
    rows = {name: merge_extra(parts, name)[..., order, :] for name in placed[0].image.extra}
    if "deepstack" in rows:
        return {"visual_pos_masks": mask, "deepstack_visual_embeds": list(rows["deepstack"])}
    by_layer = {int(name.removeprefix(LAYER_PREFIX)): features for name, features in rows.items()}
    return {"vision_mask": mask[..., None], "deepstack_features": by_layer}
