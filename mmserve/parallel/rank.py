"""What one rank holds of a model, and how it is made: the hook that the loader calls on the empty model."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from mmserve.parallel.group import Group
from mmserve.parallel.layout import Place
from mmserve.parallel.plan import tensor_plan
from mmserve.parallel.shards import Reader, finish
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
    _late: dict[str, Share] = field(default_factory=dict)

    def shape(self, model: Any, tensors: MutableMapping[str, Any]) -> None:
        """Cut the empty `model`, and make `tensors` (checkpoint name -> slice) read what is left of it.

        Raises:
            UnsupportedModelError: The model's plans are missing or can not be followed.
            ConfigError: The caller's plan does not fit the model.
        """
        reader = Reader(model)
        plan = tensor_plan(model, self.plan) if self.tensor.size > 1 else {}
        shares = shard_model(model, plan, self.tensor) if plan else {}
        # Stages are dealt by what is left of each layer: a tower that every rank keeps whole weighs more then.
        self.leftovers = keep_stage(model, self.place) if self.pipeline.size > 1 else None
        absent = (lambda name: False) if self.leftovers is None else self.leftovers.is_absent
        here = {name: share for name, share in shares.items() if not absent(name)}
        self._late = reader.narrow(tensors, model, here, absent)

    def finish(self, model: Any) -> None:
        """After the weights are read: cut what could only be read whole."""
        finish(model, self._late)
        self._late = {}

    def describe(self) -> dict[str, object]:
        """JSON-friendly."""
        layers = self.leftovers.layers if self.leftovers is not None else None
        return {
            "tensor_parallel": self.tensor.size,
            "pipeline_parallel": self.pipeline.size,
            "rank": self.place.rank,
            "layers": None if layers is None else [layers.start, layers.stop],
        }
