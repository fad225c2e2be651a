"""The transformers model of a checkpoint, with every weight in its place and nothing made up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mmserve.errors import MMServeError, ModelLoadError
from mmserve.model.checkpoint import Checkpoint
from mmserve.model.construct import construct
from mmserve.model.generation import load_generation_config
from mmserve.model.leftovers import Leftovers
from mmserve.model.memory import give_back
from mmserve.model.model_config import one_line
from mmserve.model.precision import Precision
from mmserve.model.weights import load_weights
from mmserve.parallel.rank import RankShape

__all__ = ["BuiltModel", "build_model"]


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A model and the tensors of its files that it has no place for: name -> by which rule they may be left over."""

    model: Any
    left_over: Mapping[str, str]


def build_model(
    checkpoint: Checkpoint,
    config: Any,
    precision: Precision,
    device: torch.device,
    *,
    trust_remote_code: bool = False,
    leftovers: Leftovers | None = None,
    rank: RankShape | None = None,
) -> BuiltModel:
    """The model on `device` in `precision`, for inference; one rank's part of it if `rank` is given.

    Raises:
        UnsupportedModelError: No image+text or causal language model of this type, or it lacks a library; or
            generation_config.json can not be read; or the model can not be dealt to ranks.
        WeightsError: Weights are missing, unexpected or of the wrong shape; lists them.
        ModelLoadError: The device does not take the model: out of memory, most often.
    """
    own = (checkpoint.folder / "generation_config.json").is_file()
    generation = load_generation_config(checkpoint.folder) if own else None
    model = construct(checkpoint, config, precision, trust_remote_code)
    if rank is not None:
        rank.shape(model)
    try:
        narrow = None if rank is None else rank.narrow
        left_over = load_weights(model, checkpoint, precision, device, leftovers or Leftovers(), narrow)
        if rank is not None:
            rank.finish(model)
        model.to(device).eval().requires_grad_(False)
    except MMServeError:
        raise
    except Exception as error:  # torch.OutOfMemoryError most often; or a config that its own conversions trip over
        raise ModelLoadError(
            f"the model of {str(checkpoint.folder)!r} can not be put on {str(device)!r}: {one_line(error)}"
        ) from error
    give_back()
    if generation is not None and model.can_generate():
        model.generation_config = generation
    return BuiltModel(model, left_over)
