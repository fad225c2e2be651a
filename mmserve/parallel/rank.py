"""What one rank holds of a model, and how it is made: what the loader calls on the empty model and its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mmserve.parallel.group import Group
from mmserve.parallel.layout import Place
from mmserve.parallel.plan import tensor_plan
from mmserve.parallel.shards import Reader, Stored, finish
from mmserve.parallel.shares import Share
from mmserve.parallel.stages import Leftovers, keep_stage
from mmserve.parallel.tensor import shard_model

__all__ = ["RankShape"]


@dataclass(slots=True)
class RankShape:
    """Makes a model one rank's, between its construction and its weights.

    Attributes:
        place: The rank's.
        tensor: The ranks that share its layers.
        pipeline: The ranks of the same column, one a stage.
        plan: The caller's own tensor-parallel plan, in place of the model's.
        leftovers: What the stage has; set by `shape`, None while there is one stage.
    """

    place: Place
    tensor: Group
    pipeline: Group
    plan: Mapping[str, str] | None = None
    leftovers: Leftovers | None = None
    _reader: Reader | None = None
    _shares: dict[str, Share] = field(default_factory=dict)
    _late: dict[str, Share] = field(default_factory=dict)

    def shape(self, model: Any) -> None:
        """Cut the empty `model`: what stays is this rank's.

        Raises:
            UnsupportedModelError: The model's plans are missing or can not be followed.
            ConfigError: The caller's plan does not fit the model.
        """
        self._reader = Reader(model)
        plan = tensor_plan(model, self.plan) if self.tensor.size > 1 else {}
        shares = shard_model(model, plan, self.tensor) if plan else {}
        # Stages are dealt by what is left of each layer: a tower that every rank keeps whole weighs more then.
        self.leftovers = keep_stage(model, self.place) if self.pipeline.size > 1 else None
        self._shares = {name: share for name, share in shares.items() if not self._is_absent(name)}

    def narrow(self, model: Any, tensors: Mapping[str, Stored]) -> Mapping[str, Any]:
        """What the loader reads of a checkpoint's tensors: of each, what is left of its parameter.

        Args:
            model: The one that `shape` has cut; parameters that must be read whole are made whole again.
            tensors: Checkpoint name -> tensor.
        """
        assert self._reader is not None, "shape comes before"
        own, self._late = self._reader.narrow(tensors, model, self._shares, self._is_absent)
        self._reader = None
        return own

    def finish(self, model: Any) -> None:
        """After the weights are read: cut what could only be read whole."""
        finish(model, self._late)
        self._late = {}

    def _is_absent(self, parameter: str) -> bool:
        return self.leftovers is not None and self.leftovers.is_absent(parameter)

    def describe(self) -> dict[str, object]:
        """JSON-friendly."""
        shared = self.tensor.size > 1
        layers = self.leftovers.layers if self.leftovers is not None else None
        return {
            "tensor_parallel": self.tensor.size,
            "tensor_exchange": {"through": self.tensor.through, "reason": self.tensor.reason} if shared else None,
            "pipeline_parallel": self.pipeline.size,
            "rank": self.place.rank,
            "layers": None if layers is None else [layers.start, layers.stop],
        }
