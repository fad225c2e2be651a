"""What makes any module unfit to be replaced, whatever it computes."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn

__all__ = ["any_overridden", "overridden", "pattern_of", "plain_attributes"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def overridden(module: nn.Module) -> str | None:
    """Why a module does not do what its class says, or None: a hook sees or changes what it is given, or its own
    forward was replaced. What stands in for it would leave that out.
    """
    name = type(module).__name__
    if any(getattr(module, hooks, None) for hooks in _HOOKS):
        return f"{name} has hooks, which a replacement would not call"
    if "forward" in vars(module):
        return f"{name} has a forward of its own, put there after it was made"
    return None


def any_overridden(modules: Iterable[nn.Module]) -> str | None:
    """The first reason of several modules."""
    return next((reason for module in modules if (reason := overridden(module)) is not None), None)


def plain_attributes(module: nn.Module) -> tuple[tuple[str, object], ...]:
    """Numbers, flags and names that a module keeps, but for its place in the model: what two of a kind share."""
    plain = (bool, int, float, str, type(None))
    return tuple(sorted((k, v) for k, v in vars(module).items() if isinstance(v, plain) and k != "layer_idx"))


def pattern_of(name: str) -> str:
    """A module's name without its layer's number: `model.layers.*.mlp`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
