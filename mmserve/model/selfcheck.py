"""A trial at load: a short text through the plain model and through the packed path must agree.

The packed path feeds embeddings where a plain call feeds ids, and masks where the model builds its own.
A text model that needs more than that (ids for embeddings of its layers, say) shows it here, before the
first request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mmserve.attention.interface import AttentionMetadata
from mmserve.cache.tensors import allocate
from mmserve.errors import ModelLoadError, UnsupportedModelError
from mmserve.model.generate_inputs import generate_inputs
from mmserve.model.interface import Model, PackedBatch
from mmserve.model.model_config import one_line
from mmserve.model.stage import StageLink
from mmserve.parallel.group import ExchangeError
from processors.types import ProcessedPrompt

__all__ = ["Trial", "check_agreement", "check_generates", "plain_logits"]

_LENGTH = 8
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.25}
"""Largest relative difference, by norm; half precision rounds differently in batches of another shape."""


def _trial_ids(vocab_size: int) -> list[int]:
    """Ids spread over the lower half of the vocabulary, where words are and placeholders are not."""
    return [2 + (7919 * i) % max(1, vocab_size // 2 - 2) for i in range(1, _LENGTH + 1)]


@torch.inference_mode()
def plain_logits(model: Any, vocab_size: int, stage: StageLink | None = None) -> torch.Tensor:
    """The trial text's logits [T, V] from the transformers model as it is, before anything is routed.

    It is given what `generate()` is: without types, PaliGemma's prompt would be no prefix but causal.

    On a pipeline stage that is not the last there are none: [0, V].

    Raises:
        UnsupportedModelError: The model does not run on a text alone.
        ModelLoadError: It runs, and gives values that are not finite.
        ExchangeError: Another rank is lost.
    """
    device = next(model.parameters()).device
    given = generate_inputs(model, ProcessedPrompt(token_ids=tuple(_trial_ids(vocab_size))))
    inputs = {name: given[name] for name in ("input_ids", "token_type_ids") if name in given}
    try:
        output = model(**inputs, use_cache=False) if stage is None else stage.run_plain(model, **inputs)
    except ExchangeError:
        raise
    except Exception as error:
        raise UnsupportedModelError(f"the plain model does not run on a trial text: {one_line(error)}") from error
    if output is None:
        return torch.empty(0, vocab_size, device=device)
    logits: torch.Tensor = output.logits
    if not torch.isfinite(logits).all():
        raise ModelLoadError(
            f"the model gives values that are not finite on a trial text, in {logits.dtype}: its weights or a number "
            "in its config are damaged, or it needs a wider dtype"
        )
    return logits[0].float()


@dataclass(frozen=True, slots=True)
class Trial:
    """The trial text as the packed path ran it.

    Attributes:
        batches: One or two steps, over a cache that the model is still bound to.
        logits: What it gave for each, float32 [M, V].
    """

    batches: tuple[PackedBatch, ...]
    logits: tuple[torch.Tensor, ...]


def check_agreement(model: Model, expected: torch.Tensor, block_size: int, dtype: torch.dtype) -> Trial:
    """Run the trial text through the packed path, the second half as a chunk of its own.

    Raises:
        UnsupportedModelError: The logits are not those of the plain model.
    """
    batches = _trial_batches(model, block_size, expected.device)
    trial = Trial(batches, tuple(model.forward(batch) for batch in batches))
    if not len(expected):
        return trial  # the last pipeline stage compares
    difference = float((torch.cat(trial.logits) - expected).norm() / expected.norm())
    if not difference <= _TOLERANCE[dtype]:
        raise UnsupportedModelError(
            f"on a trial text the packed path differs from the plain model by {difference:.1e} (relative), "
            f"more than {_TOLERANCE[dtype]:.0e}"
        )
    return trial


@torch.inference_mode()
def check_generates(model: Any, vocab_size: int) -> None:
    """Let transformers' own `generate()` write one token after the trial text.

    Raises:
        ModelLoadError: It fails, so no request could be answered.
    """
    ids = torch.tensor([_trial_ids(vocab_size)], device=next(model.parameters()).device)
    try:
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=1)
    except Exception as error:  # the model's own code, on a config that it did not refuse
        raise ModelLoadError(
            f"{type(model).__name__} does not run on a trial text, so the weights or its config are damaged: "
            + one_line(error)
        ) from error


def _trial_batches(model: Model, block_size: int, device: torch.device) -> tuple[PackedBatch, ...]:
    """The trial text in one or two steps, over a cache of its own that the model is bound to."""
    ids = _trial_ids(model.vocab_size)
    spec = model.cache_spec()
    blocks = -(-_LENGTH // block_size)
    model.bind_cache(allocate(spec.layers, num_blocks=blocks, block_size=block_size, dtype=spec.dtype, device=device))
    plan = model.plan(ProcessedPrompt(token_ids=tuple(ids)))
    half = _LENGTH // 2 if not plan.spans else _LENGTH
    return tuple(
        _batch(ids, plan.positions_at(start, stop), start, stop, plan.spans, device)
        for start, stop in ((0, half), (half, _LENGTH))
        if stop > start
    )


def _batch(
    ids: list[int],
    positions: torch.Tensor,
    start: int,
    stop: int,
    spans: tuple[tuple[int, int], ...],
    device: torch.device,
) -> PackedBatch:
    length = stop - start
    return PackedBatch(
        token_ids=torch.tensor(ids[start:stop], device=device),
        positions=positions.to(device),
        placements=(),
        attention=AttentionMetadata(
            query_lens=(length,),
            key_lens=(stop,),
            cu_seqlens_q=torch.tensor([0, length], dtype=torch.int32, device=device),
            key_lens_tensor=torch.tensor([stop], dtype=torch.int32, device=device),
            block_tables=torch.arange(_LENGTH, dtype=torch.int32, device=device)[None],
            slot_mapping=torch.arange(start, stop, device=device),
            spans=(spans,),
        ),
        logit_indices=torch.arange(length, device=device),
    )
