"""How much memory there is, and how much the worst step takes: what is left is for keys and values.

The worst step computes `max_num_batched_tokens` tokens, encodes as many of the largest images as a step may, and draws
with every option for `max_num_seqs` answers. It is run once, over a cache just large enough for it::

    budget = weights and all else that is loaded + worst step + image rows + processed images + keys and values
             '--------- in use before ---------'   '- trial '   '------ by the options -----'   '-- the rest -'
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from mmserve.config import EngineConfig
from mmserve.engine.admission import plan_request
from mmserve.engine.batch import Fork, NewRequest
from mmserve.engine.defaults import resolve_sampling
from mmserve.engine.runner import ModelRunner
from mmserve.engine.scheduler import Scheduler
from mmserve.engine.sizing import cache_bytes, least_cache_bytes, resolve_limits
from mmserve.errors import ConfigError
from mmserve.model.interface import Model
from mmserve.types import SamplingParams
from processors.types import ProcessedPrompt

__all__ = ["MemoryPlan", "device_memory", "plan_memory"]

DEFAULT_KV_CACHE = 1024**3
"""Bytes for keys and values where nobody says; but no more than a quarter of what there is."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where the size of the cache comes from; bytes.

    Attributes:
        rule: In words.
        kv_cache: For keys and values.
        budget: For everything, if the user gave one.
        loaded: In use before the trial: weights, libraries and all else of this process, or of it on the card.
        step: What the worst step took beyond that, its own small cache not counted.
        images: For image rows and processed images.
    """

    rule: str
    kv_cache: int
    budget: int | None = None
    loaded: int | None = None
    step: int | None = None
    images: int | None = None


def device_memory(device: torch.device) -> int:
    """Bytes that the machine (or the container that this process is in), or the card, has."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            sizes.append(int((Path("/sys/fs/cgroup") / name).read_text(encoding="ascii")))
        except (OSError, ValueError):  # no such limit, or "max"
            continue
    return min(sizes)


def plan_memory(
    config: EngineConfig,
    model: Model,
    device: torch.device,
    worst_prompt: Callable[[int], ProcessedPrompt] | None,
    sharers: int = 1,
) -> MemoryPlan:
    """How many bytes keys and values get.

    Args:
        config: The user's options.
        model: Loaded; a trial binds a small cache to it, so the real one must be bound afterwards.
        device: Where it computes.
        worst_prompt: Makes the prompt of the worst step, of so many tokens; None: text alone.
        sharers: Ranks of a parallel engine that share this memory, each with a cache of this size.

    Raises:
        ConfigError: The cache is larger than the memory, or the budget leaves nothing for it; says the numbers.
    """
    total = device_memory(device)
    if config.num_blocks is not None:
        limits = resolve_limits(config, model.cache_spec(), model.max_position, 0)
        plan = MemoryPlan("num_blocks", cache_bytes(limits.num_blocks, model.cache_spec(), config.block_size))
    elif config.memory_budget is not None:
        plan = _by_trial(config, model, device, worst_prompt)
    elif config.kv_cache_memory is not None:
        plan = MemoryPlan("kv_cache_memory", config.kv_cache_memory)
    else:
        plan = MemoryPlan(
            "default: 1 GiB, at most a quarter of the memory"
            + f" for the {sharers} ranks that share it" * (sharers > 1),
            min(DEFAULT_KV_CACHE, total // (4 * sharers)),
        )
    if plan.kv_cache * sharers > total:
        each = f" in each of {sharers} ranks" if sharers > 1 else ""
        raise ConfigError(
            f"a cache of {plan.kv_cache:,} bytes ({plan.rule}){each} is more than the {total:,} bytes of memory on "
            f"{device}: give a smaller num_blocks, kv_cache_memory or memory_budget"
        )
    return plan


def _by_trial(
    config: EngineConfig, model: Model, device: torch.device, worst_prompt: Callable[[int], ProcessedPrompt] | None
) -> MemoryPlan:
    budget = config.memory_budget or 0
    num_tokens = config.max_num_batched_tokens
    if model.max_position is not None:
        num_tokens = max(1, min(num_tokens, model.max_position - 2))
    prompt = ProcessedPrompt((1,) * num_tokens) if worst_prompt is None else worst_prompt(num_tokens)
    try:
        loaded, step = _trial(config, model, device, prompt)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise ConfigError(
            f"a step of {len(prompt.token_ids)} tokens with {len(prompt.images)} of the largest images does not fit "
            f"{device}: give a smaller max_num_batched_tokens or max_images_per_step"
        ) from error
    images = config.encoder_cache_memory + (config.processor_cache_memory if device.type == "cpu" else 0)
    rest = budget - loaded - step - images
    least = least_cache_bytes(model.cache_spec(), config.block_size)
    if rest < least:
        raise ConfigError(
            f"memory_budget {budget:,} leaves {max(0, rest):,} bytes for keys and values, and two blocks take "
            f"{least:,}: what is loaded takes {loaded:,}, the worst step ({len(prompt.token_ids)} tokens, "
            f"{len(prompt.images)} images) {step:,}, image caches {images:,}; give at least "
            f"{loaded + step + images + least:,}, or a smaller max_num_batched_tokens, max_images_per_step or "
            "encoder_cache_memory"
        )
    rule = "memory_budget, less what is loaded, the most that a trial of the worst step took, and the image caches"
    return MemoryPlan(rule, rest, budget, loaded, step, images)


def _trial(config: EngineConfig, model: Model, device: torch.device, prompt: ProcessedPrompt) -> tuple[int, int]:
    """Bytes in use before the step, and most that it takes beyond them, without its cache."""
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
    gc.collect()
    loaded = _in_use(device)
    runner = ModelRunner.for_limits(
        model,
        limits,
        device=device,
    )
    try:
        runner.touch_cache()
        _reset_peak(device)
        scheduler.add(plan_request("trial", prompt, plan, forks=forks), new)
        output = runner.run(scheduler.schedule())
        for error in output.failed.values():
            raise ConfigError(f"the trial of the worst step failed: {error}") from error
        cache = cache_bytes(limits.num_blocks, model.cache_spec(), limits.block_size)
        return loaded, max(0, _peak(device) - loaded - cache)
    finally:
        runner.close()


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return  # the peak of the whole life so far counts: more than needed, never less


def _in_use(device: torch.device) -> int:
    """Bytes in use now: of this process, or on the card."""
    return int(torch.cuda.memory_allocated(device)) if device.type == "cuda" else _resident("VmRSS:")


def _peak(device: torch.device) -> int:
    """Most bytes in use since the reset: of this process, or on the card."""
    return int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else _resident("VmHWM:")


def _resident(name: str) -> int:
    """Bytes of this process in memory, by the kernel's name for them; where it has none, the most there ever were."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        (line,) = (line for line in status.splitlines() if line.startswith(name))
        return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        import resource
        import sys

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
