"""Decoder layers of the Llama kind as one call into the library: each by itself, or all of a model's in a row.

A layer that ranks share is two calls, each up to where their parts are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from mmserve.attention.interface import AttentionMetadata, AttentionSpec, LayerCache
from mmserve.attention.intervals import visible_intervals
from mmserve.kernels.library import native_module

__all__ = ["DecoderWeights", "NativeDecoderLayer", "NativeDecoderStack", "SumOverRanks"]

SumOverRanks: TypeAlias = "Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]"
"""This rank's part of a tensor, and what comes on top -> the sum of all ranks' parts, rounded, and that added to it."""


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """Weights of one layer, all of one dtype; w its width, m its inner width.

    Attributes:
        input_norm, middle_norm: [w]; input_eps, middle_eps go with them.
        qkv: [(H + 2 K) D, w], queries first. qkv_bias: [(H + 2 K) D] or None.
        output: [w, H D]. output_bias: [w] or None.
        gate_up: [2 m, w], gates first. down: [w, m].
    """

    input_norm: torch.Tensor
    input_eps: float
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    middle_norm: torch.Tensor
    middle_eps: float
    gate_up: torch.Tensor
    down: torch.Tensor


class NativeDecoderLayer:
    """h + attention(norm(h)), then h + down(silu(gate) * up) of its norm, over the paged cache.

    A decode step of one token makes about ten calls into torch for each of these lines otherwise, each
    of which costs more than the arithmetic of a small model.

    Args:
        weights: Of the layer; of one that ranks share, this rank's heads and inner columns.
        spec: Of its attention, of this rank's heads.
        total: Sums what the weights of each rank add; None: the layer is whole.
    """

    def __init__(self, weights: DecoderWeights, spec: AttentionSpec, total: SumOverRanks | None = None) -> None:
        library = native_module()
        if library is None:
            raise RuntimeError("there is no compiled library: ask mmserve.kernels.library.status() first")
        self.spec = spec
        self.total = total
        self._output_bias = weights.output_bias
        self.native: Any = library.DecoderLayer(
            weights.input_norm,
            weights.qkv,
            weights.qkv_bias,
            weights.output,
            weights.output_bias,
            weights.middle_norm,
            weights.gate_up,
            weights.down,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_size,
            spec.scale,
            spec.soft_cap or 0.0,
            weights.input_eps,
            weights.middle_eps,
        )

    def __call__(
        self,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """hidden [T, w], cos and sin [T, D] -> [T, w]; the batch's keys and values go into the cache."""
        attention = self.native.forward if self.total is None else self.native.attention_part
        out: torch.Tensor = attention(
            hidden,
            cos,
            sin,
            cache.key,
            cache.value,
            metadata.slot_mapping,
            metadata.cu_seqlens_q,
            metadata.key_lens_tensor,
            metadata.block_tables,
            *visible_intervals(metadata, self.spec),
        )
        return out if self.total is None else self._rest(hidden, out, self.total)

    def _rest(self, hidden: torch.Tensor, part: torch.Tensor, total: SumOverRanks) -> torch.Tensor:
        """What follows this rank's part [T, w] of the attention's output, in a layer that ranks share."""
        if self._output_bias is None:
            middle = total(part, hidden)
        else:
            middle = total(part, None).add_(self._output_bias).add_(hidden)
        return total(self.native.mlp_part(middle), middle)


class NativeDecoderStack:
    """Decoder layers one after the other, in one call: what lies between two of them costs nothing any more.

    Layers that ranks share take two calls each here too, with nothing but the sums between them.
    """

    def __init__(self, layers: Sequence[NativeDecoderLayer]) -> None:
        library = native_module()
        if library is None:
            raise RuntimeError("there is no compiled library: ask mmserve.kernels.library.status() first")
        self._run: Any = library.decoder_layers
        self._layers = list(layers)
        self._native = [layer.native for layer in layers]
        self._shared = any(layer.total is not None for layer in layers)

    def __call__(
        self,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """hidden [T, w], cos and sin [T, D], a key and a value cache for each layer -> [T, w]."""
        if self._shared:
            for layer, key, value in zip(self._layers, keys, values, strict=True):
                hidden = layer(hidden, cos, sin, LayerCache(key, value), metadata)
            return hidden
        intervals = [visible_intervals(metadata, layer.spec) for layer in self._layers]
        out: torch.Tensor = self._run(
            self._native,
            hidden,
            cos,
            sin,
            keys,
            values,
            metadata.slot_mapping,
            metadata.cu_seqlens_q,
            metadata.key_lens_tensor,
            metadata.block_tables,
            [lo for lo, _ in intervals],
            [hi for _, hi in intervals],
        )
        return out
