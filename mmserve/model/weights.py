"""A checkpoint's weights into a constructed model, each exactly once, and an account of what was left over.

transformers says which tensor of a file becomes which of the model's: renames of old layouts, merges of experts,
ties. It is asked one tensor at a time and in order, so that what is read stays where it is read to, and there is
never more than the model and the parts of one tensor. What it would only warn of is an error here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from mmserve.errors import WeightsError
from mmserve.model.checkpoint import Checkpoint
from mmserve.model.leftovers import KNOWN, Leftovers
from mmserve.model.model_config import one_line
from mmserve.model.precision import Precision
from mmserve.model.stored import LazyTensor, open_tensors

__all__ = ["load_weights"]

_BY_CLASS = "as its class says"


def load_weights(
    model: Any,
    checkpoint: Checkpoint,
    precision: Precision,
    device: torch.device,
    leftovers: Leftovers,
    narrow: Callable[[Any, Mapping[str, LazyTensor]], Mapping[str, Any]] | None = None,
) -> Mapping[str, str]:
    """Fill a model whose parameters are on meta.

    Args:
        model: From `construct`.
        checkpoint: Whose weights.
        precision: What they are converted to, but for modules that their class keeps in float32.
        device: Where parameters are made.
        leftovers: Names that may be left over, besides the known ones and those that the model's class names.
        narrow: Given the model and the checkpoint's tensors, those that a model which is a part of the whole reads.

    Returns:
        Name of each tensor that was left over -> by which rule.

    Raises:
        WeightsError: Weights are missing, unexpected or of the wrong shape, or can not be converted; lists them.
    """
    with ExitStack() as files, _quiet():
        tensors = open_tensors(checkpoint, files)
        info = _place(model, tensors if narrow is None else narrow(model, tensors), precision, device)
        if info.conversion_errors:
            raise WeightsError(_failed_conversions(checkpoint, info.conversion_errors))
        unexpected = sorted(info.unexpected_keys)
        model.mark_tied_weights_as_initialized(info)
        model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
        absent = set(info.missing_keys)
        model._adjust_missing_and_unexpected_keys(info)
        _initialise(model, absent - info.missing_keys, device)
    rules = {name: Leftovers.first_match(name, (leftovers, KNOWN)) for name in unexpected}
    rules.update(dict.fromkeys(set(unexpected) - info.unexpected_keys, _BY_CLASS))
    _check_names(checkpoint, info, sorted(name for name, rule in rules.items() if rule is None))
    _check_values(checkpoint, model)
    return {name: rule for name, rule in sorted(rules.items()) if rule is not None}


def _place(model: Any, tensors: Mapping[str, LazyTensor], precision: Precision, device: torch.device) -> Any:
    """transformers' account of missing, unexpected and mismatched names, after everything else is in its place."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    config = LoadStateDictConfig(
        # A device named "disk" anywhere makes it read in order and by itself, not ahead with four threads: those
        # would hold all experts of all layers before the first are merged. No parameter has this name.
        device_map={"": device, "nothing of this name": "disk"},
        dtype=precision.dtype,
        dtype_plan=model._get_dtype_plan(precision.dtype),
        weight_mapping=get_model_conversion_mapping(model),
        ignore_mismatched_sizes=True,
    )
    info, _ = convert_and_load_state_dict_in_model(model, dict(tensors), config)
    return info


def _initialise(model: Any, names: set[str], device: torch.device) -> None:
    """Values for parameters that a class says no checkpoint need have, as the class sets them; the same each time."""
    owners = []
    for name in sorted(names):
        path, _, last = name.rpartition(".")
        owner = model.get_submodule(path)
        parameter = owner._parameters.get(last)
        if parameter is None or not parameter.is_meta:
            continue
        values = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
        setattr(owner, last, nn.Parameter(values, requires_grad=False))
        owners.append(owner)
    for owner in owners:
        owner._is_hf_initialized = False
    if owners:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            model.initialize_weights()


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bar over a terminal that is ours, and no warning of what is an error here, in its own words."""
    from transformers.utils import logging as library_logging

    library = logging.getLogger("transformers.modeling_utils")

    def drop(record: logging.LogRecord) -> bool:
        return "This checkpoint seem corrupted" not in record.getMessage()

    def no_bar(factory: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return library_logging.EmptyTqdm(*args, **kwargs)  # a bar that is disabled still starts a thread of tqdm's

    library.addFilter(drop)
    previous = library_logging.set_tqdm_hook(no_bar)
    try:
        yield
    finally:
        library_logging.set_tqdm_hook(previous)
        library.removeFilter(drop)


def _failed_conversions(checkpoint: Checkpoint, errors: Mapping[str, str]) -> str:
    reasons = [f"{name} ({_last_line(text)})" for name, text in sorted(errors.items())]
    return f"the weights of {str(checkpoint.folder)!r} can not be converted to the model's layout: {_some(reasons, 4)}"


def _last_line(text: str) -> str:
    """The error itself, of a traceback and what transformers adds after it."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("Error")]
    return one_line(ValueError(lines[-1] if lines else text), most=160)


def _check_names(checkpoint: Checkpoint, info: Any, unexpected: Sequence[str]) -> None:
    """Raise WeightsError, with names, for whatever did not go from file to model one to one."""
    problems = []
    for what, names in (("missing", sorted(info.missing_keys)), ("unexpected", unexpected)):
        if names:
            problems.append(f"{len(names)} {what}: {_some(names)}")
    if info.mismatched_keys:
        shapes = [f"{name} {tuple(found)} for {tuple(wanted)}" for name, found, wanted in sorted(info.mismatched_keys)]
        problems.append(f"{len(shapes)} of the wrong shape: {_some(shapes)}")
    if unexpected and len(problems) == 1:
        problems.append("if nothing reads them, name them in ignore_weights (such as 'begins*', '*ends', '*holds*')")
    if problems:
        raise WeightsError(f"the weights of {str(checkpoint.folder)!r} do not fit its config; " + "; ".join(problems))


def _check_values(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Raise WeightsError for a tensor that was left without storage: parameter, buffer or plain attribute."""
    empty = []
    for path, module in model.named_modules():
        owned = {**module.__dict__, **module._buffers, **module._parameters}
        empty += [
            f"{path}.{name}".lstrip(".") for name, t in owned.items() if isinstance(t, torch.Tensor) and t.is_meta
        ]
    if empty:
        raise WeightsError(
            f"{str(checkpoint.folder)!r} leaves {len(empty)} tensors without values: {_some(sorted(empty))}"
        )


def _some(names: Sequence[str], most: int = 12) -> str:
    """Names joined, the rest of a long list as a count."""
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
