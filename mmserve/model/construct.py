"""A model with its modules and buffers, and no weights yet.

Parameters are put on the meta device at the moment they are registered, wherever that is: in a layer, in a list,
on the model itself. Everything else that a constructor computes (buffers, tensors kept as plain attributes,
numbers read from tensors with `.item()`) is computed as always: it is in no weight file, so here is the only place
where it can come from.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from mmserve.errors import UnsupportedModelError
from mmserve.model.checkpoint import Checkpoint
from mmserve.model.model_config import one_line
from mmserve.model.precision import Precision

__all__ = ["construct", "parameters_on_meta"]


def construct(checkpoint: Checkpoint, config: Any, precision: Precision, trust_remote_code: bool) -> Any:
    """The transformers model of `config`: parameters on meta in the dtype they will have, buffers on the CPU.

    Raises:
        UnsupportedModelError: No image+text or causal language model is known for this config, it lacks a library,
            or the config contradicts itself.
    """
    from transformers.initialization import no_tie_weights

    auto = _auto_class(checkpoint, config, trust_remote_code)
    try:
        # Ties are made when it is known which of the tied weights the checkpoint has.
        with torch.random.fork_rng(devices=()), no_tie_weights(), parameters_on_meta():
            return auto.from_config(config, dtype=precision.dtype, trust_remote_code=trust_remote_code)
    except Exception as error:
        # The constructors of a hundred families meet a config's contradictions with errors of every class.
        raise UnsupportedModelError(
            f"{checkpoint.model_type!r} can not be built from the config of {str(checkpoint.folder)!r}: "
            + one_line(error)
        ) from error


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """While it lasts, every parameter that this thread registers in any module becomes a meta tensor."""
    own = nn.Module.register_parameter
    here = threading.get_ident()

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        own(module, name, param)
        if param is None or param.is_meta or threading.get_ident() != here:
            return
        kept = module._parameters[name]
        assert kept is not None
        module._parameters[name] = nn.Parameter(kept.to("meta"), requires_grad=kept.requires_grad)

    nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = own  # type: ignore[method-assign]


def _auto_class(checkpoint: Checkpoint, config: Any, trust_remote_code: bool) -> Any:
    """The image+text auto class if it knows this config, else the causal language models', else what comes along."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    autos = (AutoModelForImageTextToText, AutoModelForCausalLM)
    own = getattr(config, "auto_map", None) or {}
    for auto in autos:
        if type(config) in auto._model_mapping or (trust_remote_code and auto.__name__ in own):
            return auto
    raise UnsupportedModelError(
        f"transformers has no image+text or causal language model for {checkpoint.model_type!r}: "
        f"{type(config).__name__} is the config of neither"
    )
