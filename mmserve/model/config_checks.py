"""Numbers of a config that transformers takes as they are, and that no model can run with.

A config class checks types and some relations. What it lets through shows only in the answers, as values that are not
finite, or in an error of some layer at the first request; here it is found by name before a weight is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

__all__ = ["contradiction"]

_ABOVE_ZERO: Final = frozenset(
    {
        "attention_chunk_size",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "hidden_size",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "rms_norm_eps",
        "layer_norm_eps",
        "vocab_size",
    }
)
"""Fields that are greater than 0 wherever they are set; None means that there is no such thing."""
_NOT_NEGATIVE: Final = frozenset({"head_dim", "max_window_layers", "num_experts_per_tok", "sliding_window"})
"""Fields that are 0 in some families' defaults, for the same as None."""
_ROPE_ABOVE_ZERO: Final = frozenset({"factor", "original_max_position_embeddings", "rope_theta"})


def contradiction(config: Any) -> str | None:
    """The first thing in a transformers config, or in a config inside it, that can not be, with its name; or None."""
    from transformers import PreTrainedConfig

    for path, part in _parts("", config, PreTrainedConfig):
        found = _below(path, vars(part)) or _uneven_heads(path, part)
        if found is not None:
            return found
        for name, rope in _ropes(f"{path}rope_parameters", getattr(part, "rope_parameters", None)):
            found = _out_of_range(f"{name}.", rope, _ROPE_ABOVE_ZERO, 0)
            if found is not None:
                return found
    return None


def _parts(path: str, config: Any, kind: type) -> Iterator[tuple[str, Any]]:
    """The config and every config inside it, each with the dotted path to its fields."""
    yield path, config
    for name, value in vars(config).items():
        if isinstance(value, kind):
            yield from _parts(f"{path}{name}.", value, kind)


def _ropes(name: str, rope: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """One set of rotary numbers, or one for each kind of layer."""
    if isinstance(rope, dict):
        yield name, rope
        for kind, value in rope.items():
            yield from _ropes(f"{name}.{kind}", value)


def _below(path: str, values: Mapping[str, Any]) -> str | None:
    return _out_of_range(path, values, _ABOVE_ZERO, 0) or _out_of_range(path, values, _NOT_NEGATIVE, -1)


def _out_of_range(path: str, values: Mapping[str, Any], names: frozenset[str], bound: int) -> str | None:
    """The first number of those named that is not greater than `bound`, or not finite."""
    for name in sorted(names & values.keys()):
        value = values[name]
        if isinstance(value, (int, float)) and not isinstance(value, bool) and not bound < value < math.inf:
            return f"{path}{name} is {value}, and must be {'greater than' if bound == 0 else 'at least'} 0 and finite"
    return None


def _uneven_heads(path: str, config: Any) -> str | None:
    heads, groups = vars(config).get("num_attention_heads"), vars(config).get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(groups, int) and heads % groups:
        return f"{path}num_key_value_heads is {groups}, which does not divide the {heads} of num_attention_heads"
    return None
