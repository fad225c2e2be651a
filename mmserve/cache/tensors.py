"""The tensors of the paged cache: one key and one value tensor a layer, in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from mmserve.attention.interface import LayerCache
from mmserve.errors import ConfigError

__all__ = ["LayerShape", "allocate"]


class LayerShape(Protocol):
    """Heads and sizes of one layer's cache (`mmserve.model.interface.LayerCacheSpec` is one)."""

    @property
    def num_kv_heads(self) -> int:
        """K."""
        ...

    @property
    def head_size(self) -> int:
        """D."""
        ...

    @property
    def value_size(self) -> int:
        """Dv."""
        ...


def allocate(
    layers: Sequence[LayerShape],
    *,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> list[LayerCache]:
    """One cache a layer: key [num_blocks, block_size, K, D] and value [num_blocks, block_size, K, Dv].

    Filled with zeros, so that a masked read of a slot never written is a number: 0 * NaN is NaN.

    Raises:
        ConfigError: `num_blocks` or `block_size` is not positive, or the device has no room for them.
    """
    if num_blocks < 1 or block_size < 1:
        raise ConfigError(f"a cache needs at least one block of one token, not {num_blocks} blocks of {block_size}")
    try:
        return [
            LayerCache(
                key=torch.zeros(
                    num_blocks, block_size, layer.num_kv_heads, layer.head_size, dtype=dtype, device=device
                ),
                value=torch.zeros(
                    num_blocks, block_size, layer.num_kv_heads, layer.value_size, dtype=dtype, device=device
                ),
            )
            for layer in layers
        ]
    except (torch.OutOfMemoryError, RuntimeError) as error:
        size = sum(layer.num_kv_heads * (layer.head_size + layer.value_size) for layer in layers)
        total = size * num_blocks * block_size * dtype.itemsize
        raise ConfigError(
            f"no room on {device} for a cache of {num_blocks} blocks of {block_size} tokens ({total:,} bytes)"
        ) from error
