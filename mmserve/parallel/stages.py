"""Deals a model's layers to pipeline stages, and leaves on each what is its own.

Two stages of a model with four layers; rows go from left to right::

    stage 0   tower  embedding  layer 0  layer 1 | handover
    stage 1                     passed   passed  | layer 2  layer 3  norm  head
                                                   ^ rows come in

The model's own forward runs on every stage. What lies before a stage's layers is passed, on rows that nobody reads;
the first own layer takes the rows that the stage before sent. The layer after the last own one ends the forward and
gives up the rows that came to it. So scales of embeddings, and whatever else a family does around its layers, happen
where they should.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mmserve.errors import EngineError, UnsupportedModelError
from mmserve.parallel.layout import Place
from mmserve.parallel.plan import pipeline_plan

__all__ = ["HandedOver", "LayerRange", "Leftovers", "deal_layers", "keep_stage"]


class HandedOver(Exception):
    """The end of a forward on a stage that is not the last: not an error. `rows` [1, T, W] are the next stage's."""

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__("the rows are the next stage's")
        self.rows = rows


@dataclass(frozen=True, slots=True)
class LayerRange:
    """Decoder layers start..stop-1."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What a stage has: its layers, and qualified names of the modules that are not on it."""

    layers: LayerRange
    absent: tuple[str, ...]

    def is_absent(self, parameter: str) -> bool:
        """Whether a parameter belongs to a module that is not here."""
        return any(parameter.startswith(f"{name}.") for name in self.absent)


class _Absent(nn.Module):
    """In place of a module that is on another stage; says what the module's weight was like, and nothing else."""

    def __init__(self, name: str, module: Any) -> None:
        super().__init__()
        self._name = name
        for attribute, value in vars(module).items():
            # What a loop over layers asks of each: its kind, its number.
            if isinstance(value, (bool, int, str)) and not attribute.startswith("_") and attribute != "training":
                setattr(self, attribute, value)
        weight = getattr(module, "weight", None)
        self._like = (tuple(weight.shape), weight.dtype) if isinstance(weight, torch.Tensor) else None

    @property
    def weight(self) -> torch.Tensor:
        """Made when it is asked for: of what is kept, nothing may be without values."""
        if self._like is None:
            raise AttributeError("weight")
        return torch.empty(self._like[0], dtype=self._like[1], device="meta")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise EngineError(f"{self._name} was called on a pipeline stage that does not have it")


class _Passed(_Absent):
    """In place of a layer of an earlier stage: the rows go by, and are not read."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states


class _Handover(_Absent):
    """In place of the first layer of the next stage."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise HandedOver(hidden_states)


def deal_layers(sizes: Sequence[int], before: int, after: int, stages: int) -> list[LayerRange]:
    """Ranges of layers, one a stage, so that the fullest stage holds as little as can be.

    Args:
        sizes: Bytes of each layer.
        before: Bytes that go with the first layer (tower, embedding). after: With the last one (norm, head).
        stages: At most as many as layers.
    """
    count = len(sizes)
    total = [0]
    for size in sizes:
        total.append(total[-1] + size)

    def load(start: int, stop: int) -> int:
        return total[stop] - total[start] + before * (start == 0) + after * (stop == count)

    # best[n]: the least possible maximum for layers 0..n-1 over the stages so far, and the ranges that reach it.
    best: dict[int, tuple[int, list[LayerRange]]] = {0: (0, [])}
    for stage in range(1, stages + 1):
        step: dict[int, tuple[int, list[LayerRange]]] = {}
        for stop in range(stage, count - (stages - stage) + 1):
            options = (
                (max(most, load(start, stop)), [*ranges, LayerRange(start, stop)])
                for start, (most, ranges) in best.items()
                if start < stop
            )
            step[stop] = min(options, key=lambda option: option[0])
        best = step
    return best[count][1]


def keep_stage(model: Any, place: Place) -> Leftovers:
    """Leave in `model`, on the meta device, what the stage of `place` has; in place.

    Raises:
        UnsupportedModelError: The model has no pipeline plan, not exactly one list of layers in it, fewer layers
            than there are stages, or layers that take more than one stage can send the next.
    """
    _check_inputs(model)
    planned = pipeline_plan(model)
    modules = dict(model.named_modules())
    lists = [name for name in planned if isinstance(modules.get(name), nn.ModuleList)]
    kind = type(model).__name__
    if not planned:
        raise UnsupportedModelError(
            f"{kind} carries no pipeline plan, so its layers can not be dealt to stages: take tensor_parallel instead"
        )
    if len(lists) != 1:
        raise UnsupportedModelError(
            f"the pipeline plan of {kind} has {len(lists)} lists of layers ({', '.join(lists) or 'none'}), and one is "
            "dealt to stages: take tensor_parallel instead"
        )
    at = planned.index(lists[0])
    first = [*_outside(model), *planned[:at]]
    head = _name_of(model, model.get_output_embeddings())
    last = [*planned[at + 1 :], *([head] if head else [])]
    layers: Any = modules[lists[0]]
    stages = place.layout.pipeline
    if len(layers) < stages:
        raise UnsupportedModelError(f"{kind} has {len(layers)} layers, too few for {stages} pipeline stages")
    dealt = deal_layers(
        [_bytes(layer) for layer in layers],
        sum(_bytes(modules[name]) for name in first),
        sum(_bytes(modules[name]) for name in last),
        stages,
    )[place.stage]
    absent = [*_skip(model, first, last, place), *(f"{lists[0]}.{i}" for i in _others(dealt, len(layers)))]
    _replace(model, modules, absent, lists[0], dealt)
    _forget_ties(model)
    return Leftovers(dealt, tuple(absent))


def _check_inputs(model: Any) -> None:
    """Raise UnsupportedModelError for a text model whose later layers read what no stage sends on."""
    decoder = model.get_decoder()
    reasons = []
    takes = inspect.signature(decoder.forward).parameters
    if getattr(decoder, "hidden_size_per_layer_input", 0) and "per_layer_inputs" in takes:
        reasons.append("every layer takes an embedding of the ids that only the first stage has")
    shared = getattr(decoder.config, "num_kv_shared_layers", 0)
    if shared:
        reasons.append(f"its last {shared} layers read the caches of earlier ones")
    if reasons:
        raise UnsupportedModelError(
            f"{type(model).__name__} can not be dealt to pipeline stages, for {' and '.join(reasons)}: "
            "take tensor_parallel instead"
        )


def _skip(model: Any, first: Sequence[str], last: Sequence[str], place: Place) -> list[str]:
    """Modules around the layers that are not on this stage; a tied table is on both ends."""
    table = _name_of(model, model.get_input_embeddings())
    tied = bool(getattr(model, "all_tied_weights_keys", None))
    skipped = [] if place.is_first else [name for name in first if not (place.is_last and tied and name == table)]
    return skipped + ([] if place.is_last else list(last))


def _outside(model: Any) -> list[str]:
    """Modules with parameters that stand beside the decoder: tower, projector."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    found: list[str] = []

    def walk(module: nn.Module, prefix: str) -> None:
        for child_name, child in module.named_children():
            name = f"{prefix}{child_name}"
            if child is decoder or child is head:
                continue
            if any(part is decoder for part in child.modules()):
                walk(child, f"{name}.")
            elif any(True for _ in child.parameters()):
                found.append(name)

    walk(model, "")
    return found


def _others(own: LayerRange, count: int) -> list[int]:
    return [*range(own.start), *range(own.stop, count)]


def _replace(model: Any, modules: dict[str, Any], absent: Sequence[str], layers: str, own: LayerRange) -> None:
    for name in absent:
        parent, _, child = name.rpartition(".")
        kind = _Absent
        if parent == layers:
            kind = _Passed if int(child) < own.start else _Handover if int(child) == own.stop else _Absent
        placeholder = kind(name, modules[name])
        if parent == layers:
            modules[layers][int(child)] = placeholder
        else:
            setattr(modules[parent], child, placeholder)
    if own.start > 0:
        modules[layers][own.start].register_forward_pre_hook(_come_in, with_kwargs=True)


def _come_in(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Before a stage's first layer: the rows that the stage before sent, in place of those that were passed."""
    rows = getattr(kwargs.get("paged"), "entering", None)
    if rows is None:
        return None  # a trial that looks at the layers alone
    if args:
        return (rows, *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": rows}


def _forget_ties(model: Any) -> None:
    """Ties between a tensor that is here and one that is not."""
    ties = getattr(model, "all_tied_weights_keys", None)
    if ties:
        here = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        model.all_tied_weights_keys = {one: other for one, other in ties.items() if {one, other} <= here}


def _name_of(model: Any, wanted: Any) -> str | None:
    return next((name for name, module in model.named_modules() if module is wanted), None)


def _bytes(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
