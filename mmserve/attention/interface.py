"""The seam between the model's layers and whatever computes attention over the paged cache.

Letters: T tokens of the packed batch, S sequences in it, H query heads, K key-value heads, D head size,
Dv value head size, B block size, N blocks.

The paged cache of one layer, four blocks of size 4; sequence 0 has 6 tokens in blocks 2 and 0::

    block    0            1            2            3
             [4 5 . .]    [. . . .]    [0 1 2 3]    [. . . .]
    block_tables[0] = [2, 0]           slot of token 5 = 0 * 4 + 1 = 1
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

__all__ = ["AttentionBackend", "AttentionMetadata", "AttentionSpec", "LayerCache"]


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What one decoder layer asks of its attention; fixed at load.

    Attributes:
        layer: Index of the cache that the layer reads and writes (layers may share one).
        num_heads: H. num_kv_heads: K, divides H. head_size: D. value_size: Dv.
        scale: Factor on query-key products, as the model gives it.
        window: A query sees itself and the `window - 1` keys before it; None: all of them.
        chunk: A query sees keys of its own chunk of this many positions only (chunked attention); None: no chunks.
        soft_cap: scores become soft_cap * tanh(scores / soft_cap); None: as they are.
        window_cuts_spans: Whether the window also hides the far keys of a both-way span from a query in
            it (Gemma 3), or a span is seen whole whatever the window (PaliGemma 2).
        both_ways: Whether the layer takes part in both-way spans (Gemma 4's full layers stay causal).
        sinks: [H], one more score a head that takes weight and gives no value (gpt-oss); None: no sinks.
    """

    layer: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    value_size: int
    scale: float
    window: int | None = None
    chunk: int | None = None
    soft_cap: float | None = None
    window_cuts_spans: bool = False
    both_ways: bool = True
    sinks: torch.Tensor | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer, in blocks.

    Attributes:
        key: [N, B, K, D].
        value: [N, B, K, Dv].
    """

    key: torch.Tensor
    value: torch.Tensor

    @property
    def block_size(self) -> int:
        """B."""
        return self.key.shape[1]


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """How the packed batch lies over the cache; made once a step, read by every layer.

    Attributes:
        query_lens: Tokens of each sequence in this batch (sum: T).
        key_lens: Tokens of each sequence that are in the cache once this batch's are written.
        cu_seqlens_q: int32 [S + 1], running sum of query_lens, first entry 0.
        key_lens_tensor: int32 [S].
        block_tables: int32 [S, most blocks of a sequence], padded with 0; padding is never read.
        slot_mapping: int64 [T], flat slot (block * B + offset) that each token's key and value go to.
        spans: For each sequence the absolute half-open ranges of prompt positions inside which attention
            goes both ways (an image of Gemma 3, a prefix of PaliGemma). A span that overlaps a batch is
            wholly inside it: the scheduler never cuts one.
        scratch: What a backend derives from the rest (masks, biases) and wants again in the next layer of
            the same step; keyed by the backend, gone with the step.
    """

    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    cu_seqlens_q: torch.Tensor
    key_lens_tensor: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    spans: tuple[tuple[tuple[int, int], ...], ...]
    scratch: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)


class AttentionBackend(Protocol):
    """Computes attention for a packed batch and keeps the paged cache."""

    name: str

    def declines(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device, block_size: int) -> str | None:
        """None if this backend can serve the layer, else the reason in words."""
        ...

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerCache,
        spec: AttentionSpec,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Write key [T, K, D] and value [T, K, Dv] into their slots, then attend query [T, H, D].

        Returns [T, H, Dv]. Query i of a sequence stands at absolute position
        `key_len - query_len + i` and sees keys at or before it (within window or chunk), and every
        key of a both-way span that it is itself inside of.
        """
        ...
