"""The CUDA backend without a GPU: every bias against the rule, the paged kernel itself under Triton's interpreter."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from oracle import make_case, spec_of

from mmserve.attention.interface import AttentionMetadata, AttentionSpec
from mmserve.attention.intervals import visible_intervals
from mmserve.attention.masks import sequence_mask
from mmserve.attention.xformers import XFormersBackend
from mmserve.attention.xformers_biases import (
    decode_bias,
    dense_bias,
    first_key,
    needs_dense_bias,
    piece_bias,
    piece_slots,
)

pytest.importorskip("xformers", reason="xformers is not installed")

CPU = torch.device("cpu")
BATCHES = 30


def random_case(rng: random.Random, spec: AttentionSpec, lengths: list[tuple[int, int]], seed: int, block_size: int):
    spans = []
    for past, new in lengths:
        start = rng.randint(past, past + new - 1)
        spans.append(((start, rng.randint(start + 1, past + new)),) if rng.random() < 0.5 else ())
    return make_case(spec, lengths, spans=spans, block_size=block_size, seed=seed).metadata


def expected_piece_mask(metadata: AttentionMetadata, sequences: list[int], spec: AttentionSpec) -> torch.Tensor:
    blocks = [sequence_mask(metadata, i, spec, CPU) for i in sequences]
    return torch.block_diag(*[block.int() for block in blocks]).bool()


def as_mask(bias: torch.Tensor) -> torch.Tensor:
    assert set(bias.unique().tolist()) <= {0.0, float("-inf")}
    return bias == 0


@pytest.mark.parametrize("window", [None, 1, 3, 9, 100])
def test_piece_bias_is_the_rule(window: int | None) -> None:
    rng = random.Random(str(window))
    spec = spec_of(4, 2, 8, window=window)
    for seed in range(BATCHES):
        lengths = [(rng.choice([0, rng.randint(1, 20)]), rng.randint(2, 12)) for _ in range(rng.randint(1, 4))]
        metadata = make_case(spec, lengths, seed=seed).metadata
        sequences = list(range(len(lengths)))
        bias = piece_bias(metadata, sequences, spec, CPU)
        shape = (sum(metadata.query_lens), sum(metadata.key_lens))
        assert torch.equal(as_mask(bias.materialize(shape)), expected_piece_mask(metadata, sequences, spec))


@pytest.mark.parametrize("block_size", [2, 5, 64])
def test_decode_bias_is_the_rule_in_physical_pages(block_size: int) -> None:
    rng = random.Random(block_size)
    spec = spec_of(4, 2, 8)
    for seed in range(BATCHES):
        lengths = [(rng.randint(0, 3 * block_size), 1) for _ in range(rng.randint(1, 5))]
        metadata = make_case(spec, lengths, block_size=block_size, seed=seed).metadata
        sequences = sorted(rng.sample(range(len(lengths)), rng.randint(1, len(lengths))))
        bias = decode_bias(metadata, sequences, spec, block_size)
        tables = metadata.block_tables[sequences]
        mask = as_mask(bias.materialize((len(sequences), tables.numel() * block_size)))
        for row, i in enumerate(sequences):
            # Padding of a block table repeats block 0, which xformers' own materialize then writes as unseen:
            # compare with the blocks that the sequence really has.
            slots = piece_slots(metadata, [i], block_size)
            seen = torch.zeros(mask.shape[1], dtype=torch.bool)
            seen[slots[slots < mask.shape[1]]] = True
            own = set(tables[row, : -(-metadata.key_lens[i] // block_size)].tolist())
            if 0 in own and tables.shape[1] > len(own):
                continue
            assert torch.equal(mask[row], seen)


@pytest.mark.parametrize(("window", "chunk"), [(3, None), (None, 4), (5, 8), (100, None)])
def test_a_lone_query_sees_from_its_first_key_on(window: int | None, chunk: int | None) -> None:
    spec = spec_of(4, 2, 8, window=window, chunk=chunk)
    lengths = [(past, 1) for past in range(12)]
    metadata = make_case(spec, lengths).metadata
    lo, hi = visible_intervals(metadata, spec)
    assert [first_key(past, spec) for past, _ in lengths] == lo.tolist()
    bias = decode_bias(metadata, range(12), spec, 4)
    assert bias.k_seqinfo.seqstart_py[:-1] == lo.tolist()
    assert bias.k_seqinfo.seqlen_py == hi.tolist()


@pytest.mark.parametrize("cuts", [False, True])
@pytest.mark.parametrize(("window", "chunk"), [(None, None), (4, None), (None, 5)])
def test_dense_bias_is_the_rule(window: int | None, chunk: int | None, cuts: bool) -> None:
    rng = random.Random(f"{window}{chunk}{cuts}")
    spec = spec_of(4, 2, 8, window=window, chunk=chunk, window_cuts_spans=cuts)
    checked = 0
    for seed in range(BATCHES):
        metadata = random_case(rng, spec, [(rng.randint(0, 9), rng.randint(2, 12)) for _ in range(3)], seed, 4)
        for i in range(3):
            if needs_dense_bias(metadata, i, spec):
                checked += 1
                bias = dense_bias(metadata, i, spec, torch.float16, CPU)
                assert bias.shape == (1, 4, metadata.query_lens[i], metadata.key_lens[i])
                assert bias.stride(2) % 8 == 0
                mask = sequence_mask(metadata, i, spec, CPU)
                assert all(torch.equal(as_mask(bias[0, head]), mask) for head in range(4))
            else:
                full = piece_bias(metadata, [i], spec, CPU)
                shape = (metadata.query_lens[i], metadata.key_lens[i])
                assert torch.equal(as_mask(full.materialize(shape)), sequence_mask(metadata, i, spec, CPU))
    assert checked >= 10


def test_slots_of_pieces_are_where_the_cache_holds_them() -> None:
    case = make_case(spec_of(4, 2, 8), [(0, 5), (9, 3)], block_size=4)
    case.cache.key.flatten(0, 1)[case.metadata.slot_mapping] = case.key
    gathered = case.cache.key.flatten(0, 1)[piece_slots(case.metadata, [0, 1], 4)]
    torch.testing.assert_close(gathered[:5], case.key[:5])
    torch.testing.assert_close(gathered[-3:], case.key[5:])


@pytest.mark.parametrize(
    ("more", "block_size", "reason"),
    [
        ({}, 48, "pages are multiples of 64"),
        ({"soft_cap": 30.0}, 64, "soft cap"),
        ({"value_size": 16}, 64, "differ in size"),
    ],
)
def test_declines_shapes_with_a_reason(more: dict[str, float], block_size: int, reason: str) -> None:
    from mmserve.attention.xformers import _declines_shape

    assert reason in str(_declines_shape(spec_of(4, 2, 8, **more), block_size))
    assert _declines_shape(spec_of(4, 2, 8), 64) is None


def test_declines_the_cpu() -> None:
    reason = XFormersBackend().declines(spec_of(4, 2, 64), torch.float16, CPU, 64)
    assert reason == "it runs on CUDA, not on cpu"


def test_the_paged_kernel_itself_under_the_interpreter() -> None:
    """A process of its own: the interpreter must be chosen before Triton is imported."""
    pytest.importorskip("triton", reason="triton is not installed")
    script = Path(__file__).with_name("interpreted_paged_kernel.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)], capture_output=True, text=True, check=False, cwd=script.parent
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["whole", "window", "chunk"]
