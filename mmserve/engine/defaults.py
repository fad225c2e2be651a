"""Fills in what a request leaves open, from the model's own generation config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmserve.errors import InvalidRequestError
from mmserve.types import MIN_TEMPERATURE, SamplingParams

__all__ = ["DEFAULT_MAX_TOKENS", "describe_defaults", "eos_token_ids", "resolve_sampling", "unsampled_ids"]

DEFAULT_MAX_TOKENS = 256
"""Tokens of an answer when neither the request nor the model says."""


def _get(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def eos_token_ids(generation_config: Any) -> tuple[int, ...]:
    """The model's end tokens.

    Args:
        generation_config: A transformers GenerationConfig, a mapping of its fields, or None.
    """
    eos = _get(generation_config, "eos_token_id")
    if eos is None:
        return ()
    return tuple(int(i) for i in eos) if isinstance(eos, (list, tuple)) else (int(eos),)


def unsampled_ids(forbidden: Sequence[int], tokenizer: Any, vocab_size: int, generation_config: Any) -> tuple[int, ...]:
    """Ids that are never sampled: the model's placeholders, and rows of its head that no token has.

    Args:
        forbidden: The model's placeholders.
        tokenizer: One without `get_vocab` is taken to know every id.
        vocab_size: Rows of the head.
        generation_config: An end token stays, whether or not the tokenizer knows it.
    """
    get_vocab = getattr(tokenizer, "get_vocab", None)
    known = set(range(vocab_size)) if get_vocab is None else set(get_vocab().values())
    padded = set(range(vocab_size)) - known - set(eos_token_ids(generation_config))
    # A tokenizer that knows none of them is not this head's, and says nothing about it.
    return tuple(sorted({*forbidden, *padded})) if known & set(range(vocab_size)) else tuple(forbidden)


def describe_defaults(generation_config: Any) -> dict[str, object]:
    """What a request gets for each field it leaves at None, and the end tokens; JSON-friendly."""
    resolved = resolve_sampling(SamplingParams(), generation_config)
    names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return {name: getattr(resolved, name) for name in names} | {"end_token_ids": list(resolved.stop_token_ids)}


def _valid(name: str, value: Any) -> Any:
    """A config's value of one field, or None if a request could not have it."""
    if value is None:
        return None
    if name == "temperature" and isinstance(value, float) and 0.0 < value < MIN_TEMPERATURE:
        return 0.0
    try:
        return getattr(SamplingParams(**{name: value}), name)
    except InvalidRequestError:
        return None


def resolve_sampling(params: SamplingParams, generation_config: Any) -> SamplingParams:
    """`params` with no field left at None that has a default; doing it twice changes nothing.

    A model whose config does not set `do_sample` is greedy unless the request gives a temperature. top_k, top_p
    and the rest apply only if the model's config or the request names them (transformers' own top_k of 50, which
    no checkpoint asked for, does not). A value of the config that a request could not have is left out; a tiny
    temperature is greedy. The model's end tokens join `stop_token_ids` unless `ignore_eos`.

    Args:
        params: As the user gave them.
        generation_config: A transformers GenerationConfig, a mapping of its fields, or None.
    """
    ends = () if params.ignore_eos else eos_token_ids(generation_config)

    def default(name: str, own: Any, fallback: Any) -> Any:
        value = getattr(params, name)
        if value is None:
            value = _valid(name, _get(generation_config, own))
        return fallback if value is None else value

    temperature = params.temperature
    if temperature is None:
        temperature = default("temperature", "temperature", 1.0) if _get(generation_config, "do_sample") else 0.0
    max_tokens = default("max_tokens", "max_new_tokens", DEFAULT_MAX_TOKENS)
    return params.model_copy(
        update={
            "max_tokens": max(max_tokens, params.min_tokens),
            "temperature": temperature,
            "top_k": default("top_k", "top_k", 0),
            "top_p": default("top_p", "top_p", 1.0),
            "min_p": default("min_p", "min_p", 0.0),
            "repetition_penalty": default("repetition_penalty", "repetition_penalty", 1.0),
            "stop_token_ids": tuple(dict.fromkeys((*params.stop_token_ids, *ends))),
        }
    )
