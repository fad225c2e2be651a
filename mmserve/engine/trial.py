"""The worst step, made once and tried on every rank: what it takes beyond what is in use before.

It computes `max_num_batched_tokens` tokens, encodes as many of the largest images as a step may, and draws with every
option for `max_num_seqs` answers, over a cache just large enough for it.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch

from mmserve.config import EngineConfig
from mmserve.engine.admission import plan_request
from mmserve.engine.batch import Fork, NewRequest, ScheduledBatch
from mmserve.engine.defaults import resolve_sampling
from mmserve.engine.resident import reset_peak, resident
from mmserve.engine.runner import ModelRunner
from mmserve.engine.scheduler import Scheduler, SchedulerLimits
from mmserve.engine.sizing import cache_bytes, resolve_limits
from mmserve.errors import ConfigError
from mmserve.model.interface import CacheSpec, Model
from mmserve.types import SamplingParams
from processors.types import ProcessedPrompt

__all__ = ["RankTrial", "Trial", "Tried", "memory_in_use", "run_trial", "worst_trial"]


@dataclass(frozen=True, slots=True)
class Trial:
    """The worst step as a runner is given it, and the limits of that runner."""

    limits: SchedulerLimits
    batch: ScheduledBatch


@dataclass(frozen=True, slots=True)
class Tried:
    """Bytes of one process, or of its card.

    Attributes:
        loaded: In use before the step.
        step: Most that the step took beyond that, its own small cache not counted.
    """

    loaded: int
    step: int


@dataclass(frozen=True, slots=True)
class RankTrial:
    """What the trial took on one rank.

    Attributes:
        cache: Of the rank's layers. encodes: Whether it keeps rows of images.
    """

    rank: int
    cache: CacheSpec
    encodes: bool
    tried: Tried


def worst_trial(config: EngineConfig, model: Model, prompt: ProcessedPrompt) -> Trial:
    """The step that computes all of `prompt`, the worst there is, and draws for as many answers as may be."""
    plan = model.plan(prompt)
    blocks = -(-(len(prompt.token_ids) + config.max_num_seqs) // config.block_size) + config.max_num_seqs
    update = {
        "num_blocks": max(2, blocks),
        "max_model_len": None,
        "max_num_batched_tokens": max(config.max_num_batched_tokens, len(prompt.token_ids)),
    }
    limits = resolve_limits(config.model_copy(update=update), model.cache_spec(), None, 0)
    seats = 1 if model.needs_sequences else config.max_num_seqs
    forks = tuple(Fork(f"trial#{i}", i) for i in range(1, seats))
    options = SamplingParams(max_tokens=2, temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=20)
    new = NewRequest("trial", prompt, plan, resolve_sampling(options, None), forks=forks)
    scheduler = Scheduler(limits, None)
    scheduler.add(plan_request("trial", prompt, plan, forks=forks), new)
    return Trial(limits, scheduler.schedule())


def run_trial(trial: Trial, model: Model, device: torch.device, *, samples: bool = True, encodes: bool = True) -> Tried:
    """Run it here, and measure. All ranks of a parallel engine do so at the same time.

    Args:
        trial: What to run.
        model: Loaded; a small cache is bound to it while the step runs.
        device: Where it computes.
        samples: Whether tokens are chosen here. encodes: Whether images are encoded here.

    Raises:
        ConfigError: The step failed; says why.
        MemoryError: It does not fit (torch.OutOfMemoryError on a card).
    """
    gc.collect()
    loaded = memory_in_use(device)
    runner = ModelRunner.for_limits(model, trial.limits, device=device, samples=samples, encodes=encodes)
    try:
        runner.touch_cache()
        _reset_peak(device)
        output = runner.run(trial.batch)
        for error in output.failed.values():
            raise ConfigError(f"the trial of the worst step failed: {error}") from error
        cache = cache_bytes(trial.limits.num_blocks, model.cache_spec(), trial.limits.block_size)
        return Tried(loaded, max(0, _peak(device) - loaded - cache))
    finally:
        runner.close()


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        reset_peak()


def memory_in_use(device: torch.device) -> int:
    """Bytes in use now: of this process, or on the card."""
    return int(torch.cuda.memory_allocated(device)) if device.type == "cuda" else resident().now


def _peak(device: torch.device) -> int:
    """Most bytes in use since the reset: of this process, or on the card."""
    return int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else resident().peak
