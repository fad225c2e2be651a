"""Full attention of a vision tower, and the cache's writes, against float64 and plain indexing."""

from __future__ import annotations

import random

import pytest
import torch
from closeness import DTYPES, assert_near

from mmserve.kernels.interface import KernelLibrary


def expected(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    group = query.shape[1] // key.shape[1]
    key, value = key.double().repeat_interleave(group, 1), value.double().repeat_interleave(group, 1)
    weights = (query.double() @ key.transpose(-1, -2) * scale).softmax(dim=-1)
    return (weights @ value).transpose(1, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [32, 64, 72, 80, 96, 128, 256])
def test_full_attention(library: KernelLibrary, head_size: int, dtype: torch.dtype) -> None:
    rng = random.Random(head_size)
    generator = torch.Generator().manual_seed(head_size)
    for _ in range(4):
        batch, kv_heads, group = rng.choice([1, 2, 3]), rng.choice([1, 2]), rng.choice([1, 1, 3])
        queries, keys = rng.choice([1, 5, 47, 49, 97]), rng.choice([1, 15, 64, 65, 257, 300])
        value_size = rng.choice([head_size, head_size, 9, 40])
        # As a projection leaves them: [b, S, H, D], seen as [b, H, S, D].
        query = torch.randn(batch, queries, kv_heads * group, head_size, generator=generator).to(dtype).transpose(1, 2)
        key = torch.randn(batch, keys, kv_heads, head_size, generator=generator).to(dtype).transpose(1, 2)
        value = torch.randn(batch, kv_heads, keys, value_size, generator=generator).to(dtype)
        out = library.full_attention(query, key, value, head_size**-0.5)
        assert out.is_contiguous()
        assert_near(out, expected(query, key, value, head_size**-0.5))


def test_images_of_a_batch_do_not_mix(compiled: KernelLibrary) -> None:
    """Nor does it matter how the batch lies in memory."""
    query, key, value = torch.randn(3, 4, 3, 70, 64, generator=torch.Generator().manual_seed(0)).unbind(0)
    together = compiled.full_attention(query, key, value, 0.1)
    for image in range(4):
        alone = compiled.full_attention(*(x[image : image + 1] for x in (query, key, value)), 0.1)
        assert torch.equal(together[image : image + 1], alone)
    every_other = compiled.full_attention(query[::2], key[::2], value[::2], 0.1)
    assert torch.equal(every_other, together[::2])


def test_large_scores_do_not_overflow(library: KernelLibrary) -> None:
    query = 100 * torch.randn(1, 1, 5, 32, generator=torch.Generator().manual_seed(0))
    out = library.full_attention(query, query, query, 1.0)
    assert_near(out, expected(query, query, query, 1.0), factor=10)


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_cache_writes_its_slots_and_no_other(library: KernelLibrary, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    key_cache, value_cache = torch.zeros(3, 4, 2, 6, dtype=dtype), torch.zeros(3, 4, 2, 5, dtype=dtype)
    mixed = torch.randn(3, 7, 11, generator=generator).to(dtype)  # key and value as views of one projection
    key, value = mixed[:, :2, :6], mixed[:, 2:4, 6:]
    slots = torch.tensor([11, 0, 5])
    library.write_cache(key, value, key_cache, value_cache, slots)
    assert torch.equal(key_cache.flatten(0, 1)[slots], key)
    assert torch.equal(value_cache.flatten(0, 1)[slots], value)
    others = [slot for slot in range(12) if slot not in (11, 0, 5)]
    assert not key_cache.flatten(0, 1)[others].any()
    assert not value_cache.flatten(0, 1)[others].any()


def test_indices_outside_the_cache_are_refused(compiled: KernelLibrary) -> None:
    cache = torch.zeros(3, 4, 1, 8)
    new = torch.ones(1, 1, 8)
    for slot in (-1, 12):
        with pytest.raises(IndexError):
            compiled.write_cache(new, new, cache, cache.clone(), torch.tensor([slot]))

    def int32(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    for block in (-1, 3):
        with pytest.raises(IndexError):
            compiled.paged_attention(
                new, cache, cache, int32(0, 1), int32(4), int32(block)[None], int32(0), int32(4), 1.0, 0.0
            )
    with pytest.raises(RuntimeError, match="block table"):
        compiled.paged_attention(new, cache, cache, int32(0, 1), int32(5), int32(0)[None], int32(0), int32(5), 1.0, 0.0)
