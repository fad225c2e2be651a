"""The transformers model of a checkpoint, with every weight in its place and nothing made up.

transformers builds the module tree on the meta device, streams each tensor of the safetensors files
through its own renames and merges (so old layouts load), ties what is tied, and reports what did not
fit. What it would only warn of is an error here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from mmserve.errors import ModelLoadError, UnsupportedModelError, WeightsError
from mmserve.model.checkpoint import Checkpoint
from mmserve.model.generation import load_generation_config
from mmserve.model.precision import Precision
from mmserve.parallel.rank import RankShape

__all__ = ["build_model", "read_config"]


def read_config(checkpoint: Checkpoint, trust_remote_code: bool) -> Any:
    """The config object. Raises UnsupportedModelError if transformers can not make one of config.json."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=trust_remote_code)
    except (ValueError, TypeError, KeyError, AttributeError, OSError, ImportError, StrictDataclassError) as error:
        raise UnsupportedModelError(
            f"the config of {str(checkpoint.folder)!r} (model_type {checkpoint.model_type!r}) can not be read: "
            + " ".join(str(error).split())
        ) from error


def build_model(
    checkpoint: Checkpoint,
    config: Any,
    precision: Precision,
    device: torch.device,
    trust_remote_code: bool,
    rank: RankShape | None = None,
) -> Any:
    """The model on `device` in `precision`, for inference; one rank's part of it if `rank` is given.

    Raises:
        UnsupportedModelError: No image+text or causal language model of this type, or it lacks a library; or
            generation_config.json can not be read; or it can not be dealt to ranks.
        WeightsError: Weights are missing, unexpected or of the wrong shape; lists them.
        ModelLoadError: The device does not take the model: out of memory, most often.
    """
    from safetensors import SafetensorError

    own = (checkpoint.folder / "generation_config.json").is_file()
    generation = load_generation_config(checkpoint.folder) if own else None
    try:
        cls = _model_class(checkpoint, config, trust_remote_code)
        with ExitStack() as files, _quiet():
            tensors = _lazy_tensors(checkpoint, files)
            if rank is not None:
                cls = _shaped(cls, lambda model: rank.shape(model, tensors))
            model, info = cls.from_pretrained(
                None,
                config=config,
                state_dict=tensors,
                dtype=precision.dtype,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except (ValueError, ImportError) as error:
        raise UnsupportedModelError(
            f"transformers has no image+text or causal language model for {checkpoint.model_type!r} here: "
            + " ".join(str(error).split())[:300]
        ) from error
    except (SafetensorError, RuntimeError, OSError) as error:
        raise WeightsError(f"the weights of {str(checkpoint.folder)!r} can not be loaded: {error}") from error
    _check_names(checkpoint, info)
    _check_values(checkpoint, model)
    if rank is not None:
        rank.finish(model)
    if generation is not None and model.can_generate():
        model.generation_config = generation
    try:
        return model.to(device).eval().requires_grad_(False)
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        raise ModelLoadError(
            f"the model of {str(checkpoint.folder)!r} can not be put on {str(device)!r}: "
            + " ".join(str(error).split())[:300]
        ) from error


def _shaped(cls: Any, shape: Callable[[Any], None]) -> Any:
    """A class whose constructor makes an instance of `cls` and shapes it, before the loader sees it."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, *args, **kwargs)
        self.__class__ = cls
        shape(self)

    return type(cls.__name__, (cls,), {"__init__": __init__, "__module__": cls.__module__})


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bar, and no table of what did not fit: that is an error here, said once, in its own words.

    The table is logged as a warning before transformers goes on; the bar is drawn over a terminal that is ours.
    """
    from transformers.utils import logging as library_logging

    library = logging.getLogger("transformers.modeling_utils")

    def drop(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    def no_bar(factory: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return factory(*args, **{**kwargs, "disable": True})

    library.addFilter(drop)
    previous = library_logging.set_tqdm_hook(no_bar)
    try:
        yield
    finally:
        library_logging.set_tqdm_hook(previous)
        library.removeFilter(drop)


def _model_class(checkpoint: Checkpoint, config: Any, trust_remote_code: bool) -> Any:
    """The image+text class of this config, else the causal language model's, else one that comes with the folder."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.dynamic_module_utils import get_class_from_dynamic_module
    from transformers.models.auto.auto_factory import _get_model_class

    autos = (AutoModelForImageTextToText, AutoModelForCausalLM)
    for auto in autos:
        if type(config) in auto._model_mapping:
            return _get_model_class(config, auto._model_mapping)
    own = getattr(config, "auto_map", None) or {}
    for auto in autos:
        if trust_remote_code and auto.__name__ in own:
            return get_class_from_dynamic_module(own[auto.__name__], str(checkpoint.folder))
    raise ValueError(f"{type(config).__name__} is the config of neither")


def _lazy_tensors(checkpoint: Checkpoint, files: ExitStack) -> dict[str, Any]:
    """Name -> a slice that reads its tensor when it is asked for.

    Read, not mapped: a mapped file's pages would count to this process beside the tensors made from them,
    twice the model where the dtype changes.
    """
    from safetensors import safe_open

    tensors: dict[str, Any] = {}
    for path in checkpoint.files:
        file = files.enter_context(safe_open(path, framework="pt", backend="pread"))
        tensors.update({name: file.get_slice(name) for name in file.keys()})  # noqa: SIM118
    return tensors


def _check_names(checkpoint: Checkpoint, info: Mapping[str, Any]) -> None:
    """Raise WeightsError, with names, for whatever did not go from file to model one to one."""
    problems = []
    for what, names in (("missing", info["missing_keys"]), ("unexpected", info["unexpected_keys"])):
        if names:
            problems.append(f"{len(names)} {what}: {_some(sorted(names))}")
    if info["mismatched_keys"]:
        shapes = [
            f"{name} {tuple(found)} for {tuple(wanted)}" for name, found, wanted in sorted(info["mismatched_keys"])
        ]
        problems.append(f"{len(shapes)} of the wrong shape: {_some(shapes)}")
    if problems:
        raise WeightsError(f"the weights of {str(checkpoint.folder)!r} do not fit its config; " + "; ".join(problems))


def _check_values(checkpoint: Checkpoint, model: torch.nn.Module) -> None:
    """Raise WeightsError for a parameter or buffer that was left without storage."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    empty = sorted(name for name, tensor in tensors if tensor.is_meta)
    if empty:
        raise WeightsError(f"{str(checkpoint.folder)!r} leaves {len(empty)} tensors without values: {_some(empty)}")


def _some(names: Sequence[str], most: int = 12) -> str:
    """Names joined, the rest of a long list as a count."""
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
