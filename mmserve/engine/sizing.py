"""How many blocks the cache has and how long a request may be, from the options and the model."""

from __future__ import annotations

from mmserve.cache.groups import CacheGroup
from mmserve.config import EngineConfig
from mmserve.engine.scheduler import SchedulerLimits
from mmserve.errors import ConfigError
from mmserve.model.interface import CacheSpec

__all__ = ["cache_bytes", "least_cache_bytes", "resolve_limits"]


def resolve_limits(
    config: EngineConfig, spec: CacheSpec, max_position: int | None, kv_cache_memory: int
) -> SchedulerLimits:
    """All limits of an engine.

    Args:
        config: The user's options.
        spec: The model's cache.
        max_position: Most tokens that the model takes, if it says.
        kv_cache_memory: Bytes for keys and values, unless `config.num_blocks` says how many blocks.

    Raises:
        ConfigError: The cache's memory does not hold two blocks, or `max_model_len` is over what cache or model take.
    """
    groups = tuple(CacheGroup(window) for window in spec.layout().windows)
    num_blocks = _in_pool(config.num_blocks, groups) if config.num_blocks else _fitting(kv_cache_memory, config, spec)
    in_cache = _longest(num_blocks, groups, config, max_position or num_blocks * config.block_size)
    longest = in_cache if max_position is None else min(max_position, in_cache)
    wanted = config.max_model_len
    if wanted is not None and wanted > longest:
        raise ConfigError(
            f"max_model_len {wanted} is too long: the model takes {max_position} tokens "
            f"and the cache {in_cache} ({num_blocks} blocks of {config.block_size})"
        )
    return SchedulerLimits(
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=wanted or longest,
        max_images_per_step=config.max_images_per_step,
        encoder_cache_memory=config.encoder_cache_memory,
        groups=groups,
        pipeline_depth=config.pipeline_parallel,
    )


def cache_bytes(num_blocks: int, spec: CacheSpec, block_size: int) -> int:
    """Bytes of a pool's keys and values; where layers have a window, one more block stands for those given back."""
    spare = any(window is not None for window in spec.layout().windows)
    return (num_blocks + spare) * spec.slot_bytes() * block_size


def least_cache_bytes(spec: CacheSpec, block_size: int) -> int:
    """Bytes of the smallest pool that there can be: two blocks of all layers."""
    return cache_bytes(2 * len(spec.layout().windows), spec, block_size)


def _in_pool(num_blocks: int, groups: tuple[CacheGroup, ...]) -> int:
    """Blocks of the pool, of one group each, where `num_blocks` is blocks of all layers."""
    return num_blocks * len(groups)


def _fitting(memory: int, config: EngineConfig, spec: CacheSpec) -> int:
    """Blocks of the largest pool that takes no more than `memory` bytes."""
    block = spec.slot_bytes() * config.block_size
    least = least_cache_bytes(spec, config.block_size)
    if memory < least:
        raise ConfigError(
            f"kv_cache_memory {memory:,} does not hold two blocks of {config.block_size} tokens, which take {least:,} "
            "bytes; give more, or a smaller block_size"
        )
    return (memory - cache_bytes(0, spec, config.block_size)) // block


def _longest(num_blocks: int, groups: tuple[CacheGroup, ...], config: EngineConfig, most: int) -> int:
    """Tokens of the longest request that all blocks together can hold, but not over `most`."""
    least = 1
    while least < most:
        middle = (least + most + 1) // 2
        needed = sum(group.most_blocks(middle, config.max_num_batched_tokens, config.block_size) for group in groups)
        least, most = (middle, most) if needed <= num_blocks else (least, middle - 1)
    return least
