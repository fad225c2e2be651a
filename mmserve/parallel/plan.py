"""A model's own plan, resolved: which module or parameter is sharded in which style.

transformers' classes carry `tp_plan`: patterns of qualified names, numbers of list entries written as `*`, each with
the name of a style. This module matches them and refuses what can not be followed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mmserve.errors import ConfigError, UnsupportedModelError

__all__ = ["STYLES", "pipeline_plan", "tensor_plan"]

STYLES = {
    "colwise": "column",
    "colwise_gather_output": "column_gathered",
    "colwise_rep": "column_gathered",
    "rowwise": "row",
    "rowwise_split_input": "row_whole_input",
    "rowwise_rep": "row_whole_input",
    "packed_colwise": "packed_column",
    "packed_rowwise": "packed_row",
    "embedding_rowwise": "vocabulary",
    "embedding_colwise": "embedding_column",
    "moe_tp_experts": "summed",
    "all_reduce": "summed",
    "moe_identity_expert": "divided_input",
    "replicate": "whole",
    "replicated_with_grad_allreduce": "whole",
    "mla_kv_a_proj": "whole",
    "local_params": "whole",
}
"""A style of transformers 5.24 -> what it means without gradients. Its "sequence_parallel" is not among them: it cuts
one sequence into pieces, and a packed row has no such dimension."""

_LIKE = {"qwen3_vl_text": "qwen3"}
"""Text models whose class plans the embedding alone, and whose layers are those of another whose plan is whole."""


def tensor_plan(model: Any, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Qualified name of a module or parameter -> our name of its style.

    Args:
        model: A transformers model; the meta device will do.
        given: The caller's own patterns, in place of the model's.

    Raises:
        ConfigError: A pattern of `given` matches nothing, or names an unknown style.
        UnsupportedModelError: There is no plan, it reaches no decoder layer, or it names a style that is not served.
    """
    patterns = dict(given) if given is not None else _own(model)
    name = type(model).__name__
    if not patterns:
        raise UnsupportedModelError(
            f"{name} carries no tensor-parallel plan: give one as tensor_parallel_plan="
            '{"model.layers.*.self_attn.q_proj": "colwise", ...}, or split its layers by pipeline_parallel'
        )
    error = ConfigError if given is not None else UnsupportedModelError
    unknown = sorted(set(patterns.values()) - STYLES.keys())
    if unknown:
        raise error(
            f"the tensor-parallel plan of {name} names {', '.join(unknown)}; served are {', '.join(sorted(STYLES))}"
        )
    found = _match(model, patterns)
    unused = patterns.keys() - {_pattern(full) for full in found}
    if given is not None and unused:
        raise ConfigError(f"tensor_parallel_plan names what {name} does not have: {', '.join(sorted(unused))}")
    if not any(".layers." in f".{full}." for full in found):
        raise UnsupportedModelError(
            f"the tensor-parallel plan of {name} reaches none of its layers ({', '.join(sorted(patterns))}): give a "
            "whole one as tensor_parallel_plan, or split its layers by pipeline_parallel"
        )
    return found


def pipeline_plan(model: Any) -> list[str]:
    """Qualified names of the modules that the model's pipeline plan deals out, in the order in which they run."""
    decoder = model.get_decoder()
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    names = [name for name in model.pp_plan if name.startswith(f"{prefix}.")]
    if not names and decoder.config.model_type in _LIKE:
        names = [f"{prefix}.{part}" for part in ("embed_tokens", "layers", "norm")]
    return names


def _own(model: Any) -> dict[str, str]:
    patterns = dict(model.tp_plan or {})
    decoder = model.get_decoder()
    twin = _LIKE.get(decoder.config.model_type)
    if twin is not None:
        from transformers import AutoConfig

        prefix = next(name for name, module in model.named_modules() if module is decoder)
        plan = type(AutoConfig.for_model(twin)).base_model_tp_plan
        patterns |= {f"{prefix}.{pattern}": style for pattern, style in plan.items()}
    return patterns


def _match(model: Any, patterns: Mapping[str, str]) -> dict[str, str]:
    names = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]
    return {name: STYLES[patterns[pattern]] for name in names if (pattern := _pattern(name)) in patterns}


def _pattern(name: str) -> str:
    """A qualified name with the numbers of list entries as `*`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
