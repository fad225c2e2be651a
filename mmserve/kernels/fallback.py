"""The functions of `KernelLibrary` in torch: for machines where nothing can be compiled. Slower, never different."""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = [
    "attention_pays",
    "dense",
    "dense_pays",
    "full_attention",
    "gelu_tanh_",
    "layer_norm",
    "linear",
    "most_linear_rows",
    "paged_attention",
    "rms_norm",
    "silu_mul",
    "write_cache",
]

most_linear_rows = 16


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
) -> torch.Tensor:
    """x [rows, k], weight [n, k], bias [n], residual [rows, n] -> [rows, n]."""
    y = F.linear(x, weight, bias)
    return y if residual is None else y + residual


def dense_pays(rows: int, element_size: int) -> bool:
    """Never: this is torch."""
    return False


def attention_pays(element_size: int) -> bool:
    """Always: it costs nothing more."""
    return True


def dense(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str,
) -> torch.Tensor:
    """x [rows, k], weight [n, k], bias [n], residual [rows, n] -> [rows, n]."""
    y = F.linear(x, weight, bias)
    if activation == "gelu_tanh":
        y = F.gelu(y, approximate="tanh")
    elif activation == "quick_gelu":
        y = y * torch.sigmoid(1.702 * y)
    elif activation != "none":
        raise ValueError(f"there is no activation {activation!r}: none, gelu_tanh, quick_gelu")
    return y if residual is None else y + residual


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., w], weight and bias [w] -> [..., w]."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., w], weight [w] -> [..., w]; computed in float32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [..., 2 w] -> [..., w]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def gelu_tanh_(x: torch.Tensor) -> torch.Tensor:
    """In place."""
    return x.copy_(F.gelu(x, approximate="tanh"))


def write_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """key [T, K, D], value [T, K, Dv] into caches [N, B, K, D], [N, B, K, Dv] at slots int64 [T]."""
    key_cache.flatten(0, 1).index_copy_(0, slots, key)
    value_cache.flatten(0, 1).index_copy_(0, slots, value)


def full_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """query [b, H, S, D], key [b, K, L, D], value [b, K, L, Dv] -> [b, S, H, Dv]."""
    group = query.shape[1] // key.shape[1]
    out = F.scaled_dot_product_attention(
        query, key.repeat_interleave(group, 1), value.repeat_interleave(group, 1), scale=scale
    )
    return out.transpose(1, 2).contiguous()


def paged_attention(
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
    """query [T, H, D], caches [N, B, K, D] and [N, B, K, Dv] -> [T, H, Dv]; one sequence after the other."""
    group = query.shape[1] // key_cache.shape[2]
    out = query.new_empty(*query.shape[:2], value_cache.shape[3])
    bounds = cu_seqlens_q.tolist()
    for sequence, length in enumerate(key_lens.tolist()):
        rows = slice(bounds[sequence], bounds[sequence + 1])
        blocks = block_tables[sequence, : -(-length // key_cache.shape[1])].long()
        key = key_cache[blocks].flatten(0, 1)[:length].repeat_interleave(group, 1).float()
        value = value_cache[blocks].flatten(0, 1)[:length].repeat_interleave(group, 1).float()
        scores = torch.einsum("qhd,khd->hqk", query[rows].float(), key) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        keys = torch.arange(length)
        seen = (keys >= lo[rows, None]) & (keys < hi[rows, None])
        weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, value).to(out.dtype)
    return out
