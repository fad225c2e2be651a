"""A transformers model that was built, and what both paths need to know of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from mmserve.model.checkpoint import Checkpoint
from mmserve.model.precision import Precision
from mmserve.parallel.rank import RankShape

__all__ = ["LoadedModel"]

_PLACEHOLDERS: Final = (
    "image_token_id",
    "video_token_id",
    "audio_token_id",
    "image_token_index",
    "video_token_index",
)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready for inference.

    Attributes:
        model: transformers' own. checkpoint: What it was loaded from. precision, device: What it runs in, and where.
        left_over: Tensors of the weight files that no part of it reads -> by which rule they may be left over.
        rank: Whose part of the model it is; None: it is whole.
    """

    model: Any
    checkpoint: Checkpoint
    precision: Precision
    device: torch.device
    left_over: Mapping[str, str]
    rank: RankShape | None = None

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        head = self.model.get_output_embeddings()
        if head is not None and getattr(head, "weight", None) is not None:
            rows = int(head.weight.shape[0])
            # Of a head that is dealt to ranks, the weight is a part. Of a whole one it is what counts: a head may
            # have been made by one number of the config and then been tied to a table that was made by another.
            return rows if self.rank is None else int(getattr(head, "out_features", rows))
        return int(self.model.config.get_text_config(decoder=True).vocab_size)

    @property
    def forbidden_token_ids(self) -> tuple[int, ...]:
        """Placeholders of every modality that lie inside the logits: a model must not write them."""
        ids = {getattr(self.model.config, name, None) for name in _PLACEHOLDERS}
        return tuple(sorted(i for i in ids if isinstance(i, int) and 0 <= i < self.vocab_size))

    @property
    def max_position(self) -> int | None:
        """Most tokens of a sequence, if the config says."""
        most = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        return int(most) if most is not None else None

    def about(self, **more: object) -> Mapping[str, object]:
        """What `describe()` says of any model, and `more`."""
        return {
            "class": type(self.model).__name__,
            "model_type": self.checkpoint.model_type,
            "folder": str(self.checkpoint.folder),
            "dtype": str(self.precision.dtype).removeprefix("torch."),
            "dtype_reason": self.precision.reason,
            "device": str(self.device),
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "weight_bytes": sum(p.numel() * p.element_size() for p in self.model.parameters()),
            "weights_left_over": dict(self.left_over),
            "parallel": None if self.rank is None else self.rank.describe(),
            **more,
        }
