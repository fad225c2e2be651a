"""How many blocks the cache has and how long a request may be, from the options and the model."""

from __future__ import annotations

from mmserve.config import EngineConfig
from mmserve.engine.scheduler import SchedulerLimits
from mmserve.errors import ConfigError
from mmserve.model.interface import Model

__all__ = ["resolve_limits"]


def resolve_limits(config: EngineConfig, model: Model, bytes_per_token: int | None = None) -> SchedulerLimits:
    """All limits of an engine.

    Args:
        config: Options.
        model: Loaded.
        bytes_per_token: Of the cache, on the rank where it is largest; None: as `model` says.

    Raises:
        ConfigError: The cache's memory does not hold two blocks, or `max_model_len` is over what cache or model take.
    """
    if bytes_per_token is None:
        bytes_per_token = model.cache_spec().bytes_per_token()
    num_blocks = config.num_blocks or _blocks_in(config, bytes_per_token)
    in_cache = num_blocks * config.block_size
    longest = in_cache if model.max_position is None else min(model.max_position, in_cache)
    wanted = config.max_model_len
    if wanted is not None and wanted > longest:
        raise ConfigError(
            f"max_model_len {wanted} is too long: the model takes {model.max_position} tokens "
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
        pipeline_depth=config.pipeline_parallel,
    )


def _blocks_in(config: EngineConfig, bytes_per_token: int) -> int:
    block_bytes = bytes_per_token * config.block_size
    blocks = config.kv_cache_memory // block_bytes
    if blocks < 2:
        raise ConfigError(
            f"kv_cache_memory {config.kv_cache_memory:,} holds {blocks} blocks of {block_bytes:,} bytes; "
            "give more, or a smaller block_size"
        )
    return int(blocks)
