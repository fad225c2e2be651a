"""Attention backends on this machine: right against float64, then how fast against torch's SDPA and the bandwidth.

For every backend that serves the device: each mode of the protocol once, small, against dense float64; then
prefill and decode at the shape of a real layer. One run takes under four minutes on any device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from mmserve.attention.interface import AttentionBackend, AttentionMetadata, AttentionSpec, LayerCache
from mmserve.attention.masks import sequence_mask
from mmserve.attention.registry import known_backends, make_backend
from mmserve.bench.report import json_line, machine, table

__all__ = ["render", "run"]

BLOCK_SIZE = 64
LAYER = AttentionSpec(layer=0, num_heads=9, num_kv_heads=3, head_size=64, value_size=64, scale=0.125)
"""A layer of SmolVLM-256M's text model."""

MODES: dict[str, tuple[dict[str, Any], bool]] = {
    "causal": ({}, False),
    "window": ({"window": 48}, False),
    "chunk": ({"chunk": 40}, False),
    "soft cap": ({"soft_cap": 20.0}, False),
    "spans": ({}, True),
    "window, spans": ({"window": 48}, True),
    "window cuts spans": ({"window": 48, "window_cuts_spans": True}, True),
}
"""Name -> fields of the spec, and whether each piece has a both-way span."""

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
_REPEATS = 5


@dataclass(frozen=True, slots=True)
class _Batch:
    """A packed batch and the cache it lies over.

    Attributes:
        query: [T, H, D]. key: [T, K, D]. value: [T, K, Dv]: what the batch brings. past: the same of what was
            cached before, a pair (keys, values) a sequence.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    past: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    cache: LayerCache
    metadata: AttentionMetadata


def run(
    device: str = "auto",
    *,
    dtypes: Sequence[str] = (),
    prefill: Sequence[int] = (128, 1024),
    decode: Sequence[tuple[int, int]] = ((1, 1024), (8, 1024), (8, 4096)),
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Check and time every backend.

    Args:
        device: "auto", "cpu", "cuda". dtypes: Names; empty: float32 and bfloat16 on a CPU, and float16 on CUDA.
        prefill: Prompt lengths. decode: (sequences, keys of each).
        say: Called with a line of text as the run goes on.

    Returns:
        {"machine", "device", "bandwidth": bytes a second, "checks": [...], "times": [...], "passed": bool}
    """
    where = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    names = tuple(dtypes) or (("float16", "bfloat16") if where.type == "cuda" else ("float32", "bfloat16"))
    checks: list[dict[str, Any]] = []
    times: list[dict[str, Any]] = []
    bandwidth = _bandwidth(where)
    with torch.inference_mode():
        for dtype in (getattr(torch, name) for name in names):
            for backend in (make_backend(name) for name in known_backends()):
                checks += _check(backend, dtype, where)
                say(f"{backend.name}, {dtype}: checked")
            times += _time(dtype, where, prefill, decode, bandwidth)
            say(f"{dtype}: timed")
    return {
        "machine": machine(),
        "device": str(where),
        "bandwidth": bandwidth,
        "checks": checks,
        "times": times,
        "passed": all(check["error"] is None or check["ok"] for check in checks),
    }


def render(result: dict[str, Any]) -> str:
    """The result as two tables and one JSON line."""
    checks = [
        (
            f"{check['backend']}, {check['dtype']}, {check['mode']}",
            "declined" if check["error"] is None else f"{check['error']:.1e}",
            check["declined"] or ("ok" if check["ok"] else "WRONG"),
        )
        for check in result["checks"]
    ]
    times = [
        (
            f"{entry['what']}, {entry['dtype']}, {entry['backend']}",
            f"{entry['ms']:.3f}",
            f"{entry['against_sdpa']:.2f}x",
            f"{entry['of_bound']:.0%}",
        )
        for entry in result["times"]
    ]
    return "\n\n".join(
        (
            table(("check", "error", ""), checks),
            table(("time", "ms", "faster than SDPA", "of the bandwidth bound"), times),
            json_line(result),
        )
    )


def _check(backend: AttentionBackend, dtype: torch.dtype, device: torch.device) -> list[dict[str, Any]]:
    """Each mode over a batch of prompts, chunks and decodes, against dense float64."""
    lengths = [(0, 70), (100, 1), (33, 50), (64, 1), (0, 1)]
    found = []
    for mode, (fields, with_spans) in MODES.items():
        spec = replace(LAYER, **fields)
        entry: dict[str, Any] = {
            "backend": backend.name,
            "dtype": _name(dtype),
            "mode": mode,
            "error": None,
            "ok": True,
        }
        entry["declined"] = backend.declines(spec, dtype, device, BLOCK_SIZE)
        if entry["declined"] is None:
            spans = [((past + 2, past + new - 2),) if with_spans and new > 1 else () for past, new in lengths]
            batch = _batch(spec, lengths, spans, dtype, device)
            out = backend.attend(batch.query, batch.key, batch.value, batch.cache, spec, batch.metadata)
            error = float((out.double() - _exact(batch, spec)).abs().max())
            entry.update(error=error, ok=error < TOLERANCE[dtype])
        found.append(entry)
    return found


def _time(
    dtype: torch.dtype,
    device: torch.device,
    prefill: Sequence[int],
    decode: Sequence[tuple[int, int]],
    bandwidth: float,
) -> list[dict[str, Any]]:
    """Every backend that serves a plain layer, at each size, against SDPA over contiguous keys."""
    sizes = [(f"prefill {tokens}", [(0, tokens)]) for tokens in prefill]
    sizes += [(f"decode {count} x {keys}", [(keys - 1, 1)] * count) for count, keys in decode]
    found = []
    for what, lengths in sizes:
        batch = _batch(LAYER, lengths, [()] * len(lengths), dtype, device)
        element = batch.query.element_size()
        keys_read = sum(batch.metadata.key_lens) * LAYER.num_kv_heads * (LAYER.head_size + LAYER.value_size) * element
        bound = keys_read / bandwidth
        sdpa = _best(_sdpa(batch), device)
        found.append(_timing(what, dtype, "torch SDPA, contiguous", sdpa, sdpa, bound))
        for backend in (make_backend(name) for name in known_backends()):
            if backend.declines(LAYER, dtype, device, BLOCK_SIZE) is None:
                spent = _best(_attend(backend, batch), device)
                found.append(_timing(what, dtype, backend.name, spent, sdpa, bound))
    return found


def _timing(what: str, dtype: torch.dtype, backend: str, spent: float, sdpa: float, bound: float) -> dict[str, Any]:
    return {
        "what": what,
        "dtype": _name(dtype),
        "backend": backend,
        "ms": 1000 * spent,
        "against_sdpa": sdpa / spent,
        "of_bound": bound / spent,
    }


def _attend(backend: AttentionBackend, batch: _Batch) -> Callable[[], torch.Tensor]:
    return lambda: backend.attend(batch.query, batch.key, batch.value, batch.cache, LAYER, batch.metadata)


def _sdpa(batch: _Batch) -> Callable[[], torch.Tensor]:
    """What SDPA would do if every sequence's keys lay end to end and all were of one length, as they are here."""
    count = len(batch.metadata.query_lens)
    query = batch.query.view(count, -1, LAYER.num_heads, LAYER.head_size).transpose(1, 2)
    sides = []
    for new, part in ((batch.key, 0), (batch.value, 1)):
        rows = new.view(count, -1, LAYER.num_kv_heads, LAYER.head_size)
        old = torch.stack([past[part] for past in batch.past])
        sides.append(torch.cat([old, rows], dim=1).transpose(1, 2))
    causal = query.shape[2] > 1
    return lambda: F.scaled_dot_product_attention(query, sides[0], sides[1], is_causal=causal, enable_gqa=True)


def _batch(
    spec: AttentionSpec,
    lengths: Sequence[tuple[int, int]],
    spans: Sequence[tuple[tuple[int, int], ...]],
    dtype: torch.dtype,
    device: torch.device,
) -> _Batch:
    """A random batch of (cached, new) sequences over blocks in random order."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(device, dtype)

    counts = [-(-(past + new) // BLOCK_SIZE) for past, new in lengths]
    free = torch.randperm(sum(counts) + 1, generator=random).tolist()
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    key_shape = (len(free), BLOCK_SIZE, spec.num_kv_heads, spec.head_size)
    cache = LayerCache(normal(*key_shape), normal(*key_shape[:3], spec.value_size))
    pasts, slots = [], []
    for i, (past, new) in enumerate(lengths):
        blocks = torch.tensor([free.pop() for _ in range(counts[i])])
        tables[i, : counts[i]] = blocks
        position = torch.arange(past + new)
        slot = blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        slots.append(slot[past:])
        old = slot[:past].to(device)
        pasts.append((cache.key.flatten(0, 1)[old], cache.value.flatten(0, 1)[old]))
    news = [new for _, new in lengths]
    ends = [past + new for past, new in lengths]
    metadata = AttentionMetadata(
        query_lens=tuple(news),
        key_lens=tuple(ends),
        cu_seqlens_q=torch.tensor([0, *torch.tensor(news).cumsum(0).tolist()], dtype=torch.int32, device=device),
        key_lens_tensor=torch.tensor(ends, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        slot_mapping=torch.cat(slots).to(device),
        spans=tuple(spans),
    )
    total = sum(news)
    return _Batch(
        normal(total, spec.num_heads, spec.head_size),
        normal(total, spec.num_kv_heads, spec.head_size),
        normal(total, spec.num_kv_heads, spec.value_size),
        tuple(pasts),
        cache,
        metadata,
    )


def _exact(batch: _Batch, spec: AttentionSpec) -> torch.Tensor:
    """Dense float64: [T, H, Dv]."""
    group = spec.num_heads // spec.num_kv_heads
    device = batch.query.device
    parts = []
    start = 0
    for i, length in enumerate(batch.metadata.query_lens):
        rows = slice(start, start + length)
        start += length
        key, value = (
            torch.cat([old, new[rows]]).double().repeat_interleave(group, 1)
            for old, new in zip(batch.past[i], (batch.key, batch.value), strict=True)
        )
        scores = torch.einsum("qhd,khd->hqk", batch.query[rows].double(), key) * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        scores = scores.masked_fill(~sequence_mask(batch.metadata, i, spec, device), -math.inf)
        parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), value))
    return torch.cat(parts)


def _bandwidth(device: torch.device) -> float:
    """Bytes a second that a sum over a large tensor reads."""
    size = (1 << 30) if device.type == "cuda" else (1 << 28)
    data = torch.ones(size // 4, device=device)
    return size / _best(lambda: data.sum(), device)


def _best(call: Callable[[], torch.Tensor], device: torch.device) -> float:
    """Seconds of the fastest of several runs, each long enough to be measured."""

    def spent(times: int) -> float:
        _wait(device)
        began = time.perf_counter()
        for _ in range(times):
            call()
        _wait(device)
        return time.perf_counter() - began

    spent(1)
    times = max(1, min(200, int(0.05 / max(spent(1), 1e-7))))
    return min(spent(times) for _ in range(_REPEATS)) / times


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
