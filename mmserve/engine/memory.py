"""How much memory there is, and how much the worst step takes: what is left is for keys and values.

The worst step is tried once (`mmserve.engine.trial`)::

    budget = weights and all else that is loaded + worst step + image rows + processed images + keys and values
             '--------- in use before ---------'   '- trial '   '------ by the options -----'   '-- the rest -'

Each rank of a parallel engine has the budget for itself, and tries its own part; all keep as many blocks as the rank
with the least room for them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from mmserve.config import EngineConfig
from mmserve.engine.sizing import cache_bytes, least_cache_bytes, resolve_limits
from mmserve.engine.steps import Team
from mmserve.engine.trial import RankTrial, Trial, run_trial, worst_trial
from mmserve.errors import ConfigError
from mmserve.model.interface import Model
from processors.types import ProcessedPrompt

__all__ = ["MemoryPlan", "device_memory", "plan_memory"]

DEFAULT_KV_CACHE = 1024**3
"""Bytes for keys and values where nobody says; but no more than a quarter of what there is."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where the size of the cache comes from; bytes.

    Attributes:
        rule: In words.
        kv_cache: For keys and values; over several ranks, on the one where they take most.
        budget: For everything, if the user gave one; over several ranks each has it for itself.
        loaded: In use before the trial: weights, libraries and all else of this process, or of it on the card. As the
            next two, on the rank that has the least room for its cache.
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
    team: Team | None = None,
) -> MemoryPlan:
    """How many bytes keys and values get.

    Args:
        config: The user's options.
        model: Loaded; a trial binds a small cache to it, so the real one must be bound afterwards.
        device: Where it computes.
        worst_prompt: Makes the prompt of the worst step, of so many tokens; None: text alone.
        sharers: Ranks of a parallel engine that share this memory, each with a cache of this size.
        team: The other ranks, which try the worst step too.

    Raises:
        ConfigError: The cache is larger than the memory, or the budget leaves nothing for it; says the numbers.
    """
    total = device_memory(device)
    if config.memory_budget is not None and sharers > 1 and config.memory_budget * sharers > total:
        raise ConfigError(
            f"memory_budget {config.memory_budget:,} for each of {sharers} ranks is more than the {total:,} bytes of "
            f"memory on {device} that they share: give at most {total // sharers:,}"
        )
    if config.num_blocks is not None:
        limits = resolve_limits(config, model.cache_spec(), model.max_position, 0)
        plan = MemoryPlan("num_blocks", cache_bytes(limits.num_blocks, model.cache_spec(), config.block_size))
    elif config.memory_budget is not None:
        plan = _by_trial(config, model, device, worst_prompt, team)
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
    config: EngineConfig,
    model: Model,
    device: torch.device,
    worst_prompt: Callable[[int], ProcessedPrompt] | None,
    team: Team | None,
) -> MemoryPlan:
    budget = config.memory_budget or 0
    num_tokens = config.max_num_batched_tokens
    if model.max_position is not None:
        num_tokens = max(1, min(num_tokens, model.max_position - 2))
    prompt = ProcessedPrompt((1,) * num_tokens) if worst_prompt is None else worst_prompt(num_tokens)
    try:
        trials = _try_everywhere(worst_trial(config, model, prompt), model, device, team)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise ConfigError(
            f"a step of {len(prompt.token_ids)} tokens with {len(prompt.images)} of the largest images does not fit "
            f"{device}: give a smaller max_num_batched_tokens or max_images_per_step"
        ) from error
    rooms = [_Room.of(trial, config, budget, device) for trial in trials]
    tightest = min(rooms, key=lambda room: room.rest / room.trial.cache.slot_bytes())
    where = "" if team is None else f" on rank {tightest.trial.rank}"
    _check_room(tightest, config, budget, prompt, where)
    rule = "memory_budget, less what is loaded, the most that a trial of the worst step took, and the image caches"
    if team is not None:
        rule += f"; the same for each rank, and{where} it leaves the fewest blocks"
    # As many blocks everywhere: the cache is counted where a block takes most.
    most = max(room.trial.cache.slot_bytes() for room in rooms)
    kv_cache = tightest.rest * most // tightest.trial.cache.slot_bytes()
    tried = tightest.trial.tried
    return MemoryPlan(rule, kv_cache, budget, tried.loaded, tried.step, tightest.images)


def _check_room(room: _Room, config: EngineConfig, budget: int, prompt: ProcessedPrompt, where: str) -> None:
    tried, least = room.trial.tried, least_cache_bytes(room.trial.cache, config.block_size)
    if room.rest >= least:
        return
    raise ConfigError(
        f"memory_budget {budget:,} leaves {max(0, room.rest):,} bytes for keys and values{where}, and two blocks take "
        f"{least:,}: what is loaded takes {tried.loaded:,}, the worst step ({len(prompt.token_ids)} tokens, "
        f"{len(prompt.images)} images) {tried.step:,}, image caches {room.images:,}; give at least "
        f"{tried.loaded + tried.step + room.images + least:,}, or a smaller max_num_batched_tokens, "
        "max_images_per_step or encoder_cache_memory"
    )


@dataclass(frozen=True, slots=True)
class _Room:
    """What a budget leaves on one rank; bytes. images: For image rows and processed images; rest: For its cache."""

    trial: RankTrial
    images: int
    rest: int

    @staticmethod
    def of(trial: RankTrial, config: EngineConfig, budget: int, device: torch.device) -> _Room:
        """Processed images are kept by the driver, image rows by the ranks that encode."""
        images = config.encoder_cache_memory if trial.encodes else 0
        if trial.rank == 0 and device.type == "cpu":
            images += config.processor_cache_memory
        return _Room(trial, images, budget - trial.tried.loaded - trial.tried.step - images)


def _try_everywhere(trial: Trial, model: Model, device: torch.device, team: Team | None) -> list[RankTrial]:
    """What the worst step takes on each rank, this one first."""

    def own() -> RankTrial:
        samples = team is None or team.samples_here
        return RankTrial(0, model.cache_spec(), True, run_trial(trial, model, device, samples=samples))

    return [own()] if team is None else team.try_step(trial, own)
