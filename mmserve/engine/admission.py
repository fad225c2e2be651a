"""What is checked and computed once, before a request gets in line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmserve.cache.prefix_keys import ContentMap
from mmserve.engine.batch import Fork
from mmserve.engine.request import ImageExtent, Request
from mmserve.engine.scheduler import PLACES_PER_PRIORITY
from mmserve.errors import InvalidRequestError
from mmserve.model.interface import PromptPlan
from mmserve.types import SamplingParams
from processors.types import ImageItem, ProcessedPrompt

__all__ = ["MAX_LOGIT_ROWS", "check_sampling", "encode_bad_words", "plan_request"]

MAX_LOGIT_ROWS = 128
"""Prompt tokens a step whose logits are all kept: rows of the vocabulary's width are large."""


def plan_request(
    request_id: str,
    prompt: ProcessedPrompt,
    plan: PromptPlan,
    *,
    priority: int = 0,
    arrival: int = 0,
    forks: Sequence[Fork] = (),
    all_logits: bool = False,
) -> Request:
    """The scheduler's view of a request.

    Args:
        request_id: Unique in the engine.
        prompt: Expanded ids and images.
        plan: The model's; only its spans matter here.
        priority: Lower runs sooner.
        arrival: Running number.
        forks: Further answers.
        all_logits: The logits of every prompt token are wanted, so each must be computed.

    Raises:
        InvalidRequestError: There are no tokens, or the images' ranges do not lie in them, one after the other.
    """
    if not prompt.token_ids:
        raise InvalidRequestError("the prompt has no tokens")
    ends = [0, *(item.range.end for item in prompt.images)]
    starts = [*(item.range.offset for item in prompt.images), len(prompt.token_ids)]
    if any(start < end for start, end in zip(starts, ends, strict=True)):
        raise InvalidRequestError(
            f"the placeholder ranges of {len(prompt.images)} images do not lie one after the other "
            f"in {len(prompt.token_ids)} tokens"
        )
    images = [_extent(index, item) for index, item in enumerate(prompt.images) if item.range.num_embeds]
    content = ContentMap([(i.key, i.range.offset, i.range.end) for i in prompt.images], plan.spans)
    return Request(
        request_id=request_id,
        order=(priority * PLACES_PER_PRIORITY + arrival, arrival, 0),
        token_ids=list(prompt.token_ids),
        num_prompt=len(prompt.token_ids),
        images=tuple(images),
        spans=plan.spans,
        content=content,
        # What lies in prompt-wide tensors is not part of a block's key.
        reads_prefix=not (prompt.prompt_tensors or all_logits),
        writes_prefix=not prompt.prompt_tensors,
        chunk_limit=MAX_LOGIT_ROWS if all_logits else None,
        forks=tuple(fork.request_id for fork in forks),
    )


def _extent(index: int, item: ImageItem) -> ImageExtent:
    positions = item.range.embed_positions()
    return ImageExtent(index, item.key, positions[0], positions[-1], len(positions))


def check_sampling(params: SamplingParams, vocab_size: int, forbidden: Sequence[int]) -> None:
    """Whether the ids in `params` exist in this model.

    Raises:
        InvalidRequestError: One does not, or every allowed one is forbidden.
    """
    named = {"logit_bias": params.logit_bias, "allowed_token_ids": params.allowed_token_ids or ()}
    for field, ids in (*named.items(), ("stop_token_ids", params.stop_token_ids)):
        for token_id in ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequestError(f"{field} names id {token_id}, but the model has ids 0 to {vocab_size - 1}")
    if params.allowed_token_ids is not None and set(params.allowed_token_ids) <= set(forbidden):
        raise InvalidRequestError(
            "allowed_token_ids names only placeholder ids and rows of the head without a token, never generated"
        )


def encode_bad_words(tokenizer: Any, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Token sequences of each word, as it is and as it stands after a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, " " + word.lstrip(" ")):
            ids = tuple(int(i) for i in tokenizer.encode(text, add_special_tokens=False))
            if ids:
                found[ids] = None
    return tuple(found)
