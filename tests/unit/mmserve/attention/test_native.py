"""The CPU backend against float64 loops: every rule, every instruction set, batches that mix prefill and decode."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from oracle import Case, make_case, spec_of

from mmserve.attention.interface import AttentionSpec
from mmserve.attention.intervals import visible_intervals
from mmserve.attention.masks import sequence_mask
from mmserve.attention.native import NativeBackend
from mmserve.kernels import library
from mmserve.kernels.library import native_module, status

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(params=["amx", "avx512", "avx2", "plain", "torch"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[NativeBackend]:
    """Over one instruction set of the compiled library, or over the torch code."""
    if request.param == "torch":
        monkeypatch.setattr(library, "_loaded", (None, "under test"))
        yield NativeBackend()
        return
    module = native_module()
    if module is None or request.param not in module.available_instruction_sets():
        pytest.skip(f"{request.param} can not run here: {status().reason}")
    before = module.active_instruction_set()
    module.use_instruction_set(request.param)
    yield NativeBackend()
    module.use_instruction_set(before)


def check(backend: NativeBackend, case: Case) -> None:
    out = backend.attend(case.query, case.key, case.value, case.cache, case.spec, case.metadata)
    assert out.dtype == case.query.dtype
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.double(), case.expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_size", [32, 40, 64, 128, 256])
def test_mixed_batches(backend: NativeBackend, head_size: int, dtype: torch.dtype) -> None:
    lengths = [(0, 7), (5, 1), (30, 60), (0, 1), (70, 1), (8, 4)]
    for kv_heads, group in ((1, 1), (2, 3)):
        spec = spec_of(kv_heads * group, kv_heads, head_size)
        check(backend, make_case(spec, lengths, block_size=16, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_batches(backend: NativeBackend, dtype: torch.dtype) -> None:
    rng = random.Random(2)
    for seed in range(25):
        kv_heads = rng.choice([1, 2, 3])
        spec = spec_of(
            kv_heads * rng.choice([1, 2, 4, 9]),
            kv_heads,
            rng.choice([2, 8, 24, 64]),
            value_size=rng.choice([8, 24, 40]),
            window=rng.choice([None, None, 1, 2, 5, 17]),
            chunk=rng.choice([None, None, None, 3, 8]),
            soft_cap=rng.choice([None, None, 3.0]),
            window_cuts_spans=rng.random() < 0.5,
        )
        lengths = [(rng.choice([0, 0, rng.randint(1, 30)]), rng.choice([1, 1, rng.randint(2, 20)])) for _ in range(5)]
        spans = []
        for past, new in lengths:
            start = rng.randint(0, past + new - 1)
            # A lone query is never inside a span of its own batch: the scheduler does not cut one.
            spans.append(((start, rng.randint(start + 1, past + new)),) if new > 1 and start >= past else ())
        block_size = rng.choice([1, 3, 4, 16])
        check(backend, make_case(spec, lengths, spans=spans, block_size=block_size, dtype=dtype, seed=seed))


@pytest.mark.parametrize("window", [None, 300])
def test_more_keys_than_a_block_or_a_split_holds(backend: NativeBackend, window: int | None) -> None:
    """Blocks of 256 keys in a prefill, splits of 256 in a decode; also keys of which a whole block is hidden."""
    spec = spec_of(4, 2, 32, window=window)
    check(backend, make_case(spec, [(520, 1), (255, 1), (256, 1), (500, 40), (0, 300)], block_size=64))


def test_a_result_does_not_depend_on_the_batch(backend: NativeBackend) -> None:
    """Bit for bit: alone, with others, and with any number of threads."""
    if status().reason == "under test":
        pytest.skip("torch's own products make no such promise")
    spec = spec_of(6, 2, 64)
    case = make_case(spec, [(600, 1), (3, 1), (40, 9)], block_size=16, dtype=torch.bfloat16)
    together = backend.attend(case.query, case.key, case.value, case.cache, spec, case.metadata)
    alone = make_case(spec, [(600, 1)], block_size=16, dtype=torch.bfloat16)
    for new, old in ((alone.query, case.query), (alone.key, case.key), (alone.value, case.value)):
        new.copy_(old[:1])
    for ours, theirs in ((alone.cache.key, case.cache.key), (alone.cache.value, case.cache.value)):
        for mine, other in zip(alone.metadata.block_tables[0], case.metadata.block_tables[0], strict=True):
            ours[mine] = theirs[other]
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            again = backend.attend(alone.query, alone.key, alone.value, alone.cache, spec, alone.metadata)
            assert torch.equal(again, together[:1])
    finally:
        torch.set_num_threads(threads)


def test_unwritten_slots_are_never_read(backend: NativeBackend) -> None:
    spec = spec_of(4, 2, 32)
    case = make_case(spec, [(0, 9), (21, 1), (3, 6)], block_size=8)
    for cache in (case.cache.key, case.cache.value):
        written = torch.zeros(cache.shape[0] * 8, dtype=torch.bool)
        for i, length in enumerate(case.metadata.key_lens):
            for position in range(length):
                written[case.metadata.block_tables[i, position // 8] * 8 + position % 8] = True
        cache.flatten(0, 1)[~written] = float("nan")
    check(backend, case)


def test_what_is_not_a_number_stays_so(backend: NativeBackend) -> None:
    """A broken row must be seen by whoever checks the logits, and break no other sequence."""
    case = make_case(spec_of(4, 2, 32), [(9, 1), (0, 3), (9, 1)])
    case.query[0] = float("nan")
    case.query[2] = float("nan")
    out = backend.attend(case.query, case.key, case.value, case.cache, case.spec, case.metadata)
    assert out.isnan().flatten(1).all(1).tolist() == [True, False, True, False, False]
    assert not out[[1, 3, 4]].isnan().any()


@pytest.mark.parametrize("cuts", [False, True])
@pytest.mark.parametrize(("window", "chunk"), [(None, None), (3, None), (None, 4), (3, 8)])
def test_intervals_are_the_rule(window: int | None, chunk: int | None, cuts: bool) -> None:
    spec = spec_of(1, 1, 8, window=window, chunk=chunk, window_cuts_spans=cuts)
    spans = [((2, 6),), ((5, 8), (8, 11)), ((1, 4),), (), ((0, 3), (3, 12))]
    metadata = make_case(spec, [(0, 7), (4, 8), (6, 1), (3, 3), (0, 14)], spans=spans).metadata
    lo, hi = visible_intervals(metadata, spec)
    assert lo.dtype == hi.dtype == torch.int32
    start = 0
    for i, length in enumerate(metadata.query_lens):
        keys = torch.arange(metadata.key_lens[i])
        rows = slice(start, start + length)
        mask = (keys >= lo[rows, None]) & (keys < hi[rows, None])
        assert torch.equal(mask, sequence_mask(metadata, i, spec, CPU))
        start += length
    assert visible_intervals(metadata, spec)[0] is lo  # the next layer of the step does not make them again


@pytest.mark.parametrize(
    ("spec", "dtype", "device", "reason"),
    [
        (spec_of(4, 2, 64), torch.float16, "cpu", "in bfloat16 and float32, not in float16"),
        (spec_of(4, 2, 64), torch.float32, "meta", "on the CPU, not on meta"),
        (spec_of(4, 2, 7), torch.float32, "cpu", "is odd"),
        (spec_of(4, 2, 514), torch.float32, "cpu", "over 512"),
        (spec_of(4, 2, 64, scale=-1.0), torch.float32, "cpu", "scale of -1.0"),
    ],
)
def test_declines_with_a_reason(spec: AttentionSpec, dtype: torch.dtype, device: str, reason: str) -> None:
    assert reason in str(NativeBackend().declines(spec, dtype, torch.device(device), 16))


def test_declines_without_a_library_and_serves_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    if status().native:
        assert NativeBackend().declines(spec_of(4, 2, 64), torch.bfloat16, CPU, 16) is None
    monkeypatch.setattr(library, "_loaded", (None, "there is no C++ compiler: 'c++' is not found"))
    reason = NativeBackend().declines(spec_of(4, 2, 64), torch.bfloat16, CPU, 16)
    assert reason == "the kernels are not compiled: there is no C++ compiler: 'c++' is not found"
