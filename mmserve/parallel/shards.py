"""Reads from a checkpoint what is one rank's, and no more.

transformers' loader asks each tensor of the checkpoint for its values, once, and renames and merges what it gets. Here
it is given tensors that answer with this rank's slice. Which slice that is follows from the parameter that the tensor
ends in, so the loader's own renames are asked for that. Where a merge does not commute with cutting (tensors of other
shapes joined, say), the parameter is read whole, and `finish` cuts it afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from mmserve.parallel.shares import Share

__all__ = ["Reader", "Stored", "before_transposition", "finish"]

_COMMUTING = ("MergeModulelist", "Concatenate")
"""Merges that cutting commutes with: lists of experts stacked, gates and ups joined."""


@dataclass(frozen=True, slots=True)
class _Target:
    """Where a tensor of the checkpoint ends up: a parameter, and the merge on the way, if any."""

    name: str
    converter: Any | None


class Stored(Protocol):
    """A tensor of a checkpoint, not read yet."""

    @property
    def size(self) -> tuple[int, ...]:
        """Its shape."""
        ...

    def part(self, device: Any, dtype: torch.dtype, dim: int, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Half-open ranges of its dimension `dim` (-1 is the last), joined, in memory of their own."""
        ...


@dataclass(frozen=True, slots=True)
class _Sliced:
    """A tensor that reads one rank's share of itself."""

    whole: Stored
    share: Share

    def __getitem__(self, index: object) -> _Sliced:
        """Itself: `tensor[...]` is how the loader asks for all of it, and nothing is read yet."""
        return self

    def to(self, device: Any, dtype: torch.dtype) -> torch.Tensor:
        return self.whole.part(device, dtype, self.share.dim, self.share.ranges)


class Reader:
    """The way from a checkpoint's tensors to a model's parameters.

    Args:
        model: The whole model on the meta device, before anything of it is cut or left out.
    """

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        entries = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in entries if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in entries if isinstance(entry, WeightConverter)]
        self._by_pattern = {pattern: entry for entry in self._converters for pattern in entry.source_patterns}
        self._prefix = model.base_model_prefix
        self._whole = {name: tensor.shape for name, tensor in model.state_dict().items()}
        self._state = model.state_dict()

    def narrow(
        self, tensors: Mapping[str, Stored], model: Any, shares: Mapping[str, Share], absent: Callable[[str], bool]
    ) -> tuple[dict[str, Any], dict[str, Share]]:
        """What reads this rank's part, without what it has nothing of.

        Args:
            tensors: Checkpoint name -> tensor.
            model: The rank's own, cut; parameters that must be read whole are made whole again.
            shares: Of each parameter that was cut.
            absent: Whether a parameter of the whole model is not on this rank.

        Returns:
            Checkpoint name -> what the loader is given, and the shares of parameters that are still whole, for
            `finish`.
        """
        sliced: set[str] = set()
        own: dict[str, Any] = {}
        for name, tensor in tensors.items():
            target = self._target(name)
            if absent(target.name):
                continue
            share = shares.get(target.name)
            read = None if share is None else self._own(tensor.size, target, share)
            own[name] = tensor if read is None else _Sliced(tensor, read)
            if read is not None:
                sliced.add(target.name)
        tied = (getattr(model, "all_tied_weights_keys", None) or {}).keys()
        late = {name: share for name, share in shares.items() if name not in sliced and name not in tied}
        for name in late:
            owner, child = _owner(model, name)
            part = getattr(owner, child)
            whole = torch.empty(self._whole[name], dtype=part.dtype, device=part.device)
            setattr(owner, child, nn.Parameter(whole, requires_grad=False))
        return own, late

    def _target(self, name: str) -> _Target:
        from transformers.core_model_loading import rename_source_key

        renamed, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self._state)
        if renamed not in self._whole and name in self._whole:
            renamed, pattern = rename_source_key(name, [], [], self._prefix, self._state)
        return _Target(renamed, None if pattern is None else self._by_pattern[pattern])

    def _own(self, shape: tuple[int, ...], target: _Target, share: Share) -> Share | None:
        """What to read of a tensor that ends in a cut parameter; None if it must be read whole."""
        size = shape[share.dim] if len(shape) >= -share.dim else None
        if target.converter is None:
            return share if size == share.size else None
        if [type(step).__name__ for step in target.converter.operations] == ["Transpose"]:
            return before_transposition(target.converter.operations[0], shape, self._whole[target.name], share)
        if any(type(step).__name__ not in _COMMUTING for step in target.converter.operations):
            return None
        if len(target.converter.target_patterns) != 1 or len(target.converter.source_patterns) not in (1, share.parts):
            return None
        own = share if len(target.converter.source_patterns) == 1 else share.of_part()
        return own if size == own.size else None


def before_transposition(step: Any, stored: tuple[int, ...], whole: Sequence[int], share: Share) -> Share | None:
    """What to read of a tensor that is transposed to the parameter of shape `whole`; None: all of it.

    Some transpositions look at the shape of what was read and leave it if it is the parameter's already. Where the cut
    has that shape only because it was cut, they would go wrong, and the whole is read.
    """
    if step.check_dims and stored == tuple(whole):
        return share
    swap = {step.dim0: step.dim1, step.dim1: step.dim0}
    axis = len(whole) + share.dim
    if stored != tuple(whole[swap.get(i, i)] for i in range(len(whole))):
        return None
    own = replace(share, dim=swap.get(axis, axis) - len(whole))
    return None if step.check_dims and own.shape(stored) == share.shape(whole) else own


def finish(model: Any, late: Mapping[str, Share]) -> None:
    """Cut the parameters that were read whole."""
    for name, share in late.items():
        owner, child = _owner(model, name)
        whole = getattr(owner, child)
        setattr(owner, child, nn.Parameter(share.cut(whole.data), requires_grad=False))


def _owner(model: Any, name: str) -> tuple[Any, str]:
    parent, _, child = name.rpartition(".")
    return model.get_submodule(parent), child
