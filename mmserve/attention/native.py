"""The CPU backend: the kernels of `mmserve.kernels` over the paged cache."""

from __future__ import annotations

import torch

from mmserve.attention.interface import AttentionMetadata, AttentionSpec, LayerCache
from mmserve.attention.intervals import visible_intervals
from mmserve.kernels.library import kernels, status

__all__ = ["NativeBackend"]

MAX_HEAD_SIZE = 512


class NativeBackend:
    """bfloat16 and float32 on a CPU, every mask of the protocol, compiled."""

    name = "native"

    def declines(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device, block_size: int) -> str | None:
        """None if the kernels can serve the layer, else why not. Compiles them on first use."""
        if device.type != "cpu":
            return f"it runs on the CPU, not on {device.type}"
        if dtype not in (torch.bfloat16, torch.float32):
            return f"it computes in bfloat16 and float32, not in {str(dtype).removeprefix('torch.')}"
        if spec.head_size % 2 or max(spec.head_size, spec.value_size) > MAX_HEAD_SIZE:
            return f"head size {spec.head_size} (values {spec.value_size}) is odd or over {MAX_HEAD_SIZE}"
        if spec.sinks is not None:
            return "it has no attention sinks"
        if spec.scale <= 0:
            return f"a scale of {spec.scale} turns the order of the scores around"
        state = status()
        return None if state.native else f"the kernels are not compiled: {state.reason}"

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerCache,
        spec: AttentionSpec,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """As the protocol says: query [T, H, D], key [T, K, D], value [T, K, Dv] -> [T, H, Dv]."""
        library = kernels()
        library.write_cache(_dense(key), _dense(value), cache.key, cache.value, metadata.slot_mapping)
        lo, hi = visible_intervals(metadata, spec)
        return library.paged_attention(
            _dense(query),
            cache.key,
            cache.value,
            metadata.cu_seqlens_q,
            metadata.key_lens_tensor,
            metadata.block_tables,
            lo,
            hi,
            spec.scale,
            spec.soft_cap or 0.0,
        )


def _dense(x: torch.Tensor) -> torch.Tensor:
    """The kernels take any strides but the last dimension's."""
    return x if x.stride(-1) == 1 else x.contiguous()
