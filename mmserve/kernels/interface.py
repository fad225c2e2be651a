"""What the compiled library and the torch code both offer.

Letters as in `mmserve.attention.interface`: T tokens, S sequences, H query heads, K key-value heads, D head
size, Dv value head size, N blocks of size B. All tensors of a call have one dtype, bfloat16 or float32, and
are on the CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

__all__ = ["KernelLibrary"]


class KernelLibrary(Protocol):
    """Functions of the kernels."""

    most_linear_rows: int
    """The most rows that `linear` takes."""

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
    ) -> torch.Tensor:
        """x [rows, k] times weight [n, k], plus bias [n] and residual [rows, n] -> [rows, n]; k even for bfloat16."""
        ...

    def dense_pays(self, rows: int, element_size: int) -> bool:
        """Whether `dense` of so many rows is faster than torch for elements of so many bytes on this processor."""
        ...

    def attention_pays(self, element_size: int) -> bool:
        """Whether `full_attention` is faster than torch's for elements of so many bytes on this processor."""
        ...

    def dense(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        activation: str,
    ) -> torch.Tensor:
        """activation(x [rows, k] times weight [n, k] plus bias [n]) plus residual [rows, n] -> [rows, n].

        For many rows; k even for bfloat16; activation "none", "gelu_tanh" or "quick_gelu".
        """
        ...

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        """x [..., w] less its mean, over its deviation (eps added to the variance), times weight [w], plus bias [w]."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [..., w] over the root of its mean square (eps added), times weight [w] -> [..., w]."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [..., 2 w], the gates first -> silu(gate) * up [..., w]."""
        ...

    def gelu_tanh_(self, x: torch.Tensor) -> torch.Tensor:
        """The tanh form of GELU, in place."""
        ...

    def write_cache(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """key [T, K, D] and value [T, K, Dv] into key_cache [N, B, K, D], value_cache [N, B, K, Dv] at int64 [T]."""
        ...

    def full_attention(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """query [b, H, S, D], key [b, K, L, D], value [b, K, L, Dv], nothing masked -> [b, S, H, Dv]."""
        ...

    def paged_attention(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        key_lens: torch.Tensor,
        block_tables: torch.Tensor,
        lo: torch.Tensor,
        hi: torch.Tensor,
        scale: float,
        soft_cap: float,
    ) -> torch.Tensor:
        """query [T, H, D] over the cache -> [T, H, Dv].

        cu_seqlens_q int32 [S + 1], key_lens int32 [S], block_tables int32 [S, blocks]; query t sees the keys
        lo[t] .. hi[t] - 1 of its sequence (int32 [T]); soft_cap 0: none.
        """
        ...
