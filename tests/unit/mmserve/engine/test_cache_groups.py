"""Layers with a sliding window keep only their window: with ints, and through the engine on the mock model."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_driver import Driver, image

from mmserve.cache.groups import NO_BLOCK, CacheGroup
from mmserve.config import EngineConfig
from mmserve.engine.core import Engine
from mmserve.engine.sizing import cache_bytes, resolve_limits
from mmserve.errors import CapacityError, ConfigError, ModelOutputError
from mmserve.model.interface import CacheSpec, LayerCacheSpec
from mmserve.testing import ByteTokenizer, MockModel, mock_image, mock_prompt
from mmserve.types import SamplingParams

WAIT = 300
FULL_AND_WINDOW = (CacheGroup(), CacheGroup(6))


def held(driver: Driver, name: str) -> list[int]:
    """Blocks that a request holds, by group."""
    return [sum(block != NO_BLOCK for block in table) for table in driver.requests[name].tables]


def test_a_window_group_holds_no_more_than_its_window() -> None:
    driver = Driver(groups=FULL_AND_WINDOW, max_num_batched_tokens=8)
    request = driver.add("a", range(30), max_tokens=20)
    while driver.scheduler.has_work():
        driver.step()
        if not request.tables:
            continue
        full, windowed = held(driver, "a")
        assert full == max(8, driver.scheduler.blocks.groups[0].most_blocks(request.num_computed, 8, 4))
        # The 6 keys that the next query sees, its own included, lie in 2 or 3 blocks of 4.
        assert windowed <= 3
        assert request.tables[1].count(NO_BLOCK) == FULL_AND_WINDOW[1].first_needed(request.num_computed, 4)
        assert driver.scheduler.blocks.pool.num_held == full + windowed
    assert driver.scheduler.blocks.most(50, 8) == 13 + 5


def test_what_moved_out_of_a_window_serves_another_group() -> None:
    """60 tokens without windows would need 15 blocks in each of two groups; 20 are enough."""
    driver = Driver(groups=FULL_AND_WINDOW, num_blocks=20, max_num_batched_tokens=4)
    driver.add("a", range(50), max_tokens=11)
    driver.run()
    assert driver.requests["a"].num_tokens == 61
    with pytest.raises(CapacityError, match=r"pieces of up to 4.*need 21 cache blocks of 4 tokens, but there are 20"):
        driver.add("b", range(50), max_tokens=16)


def test_a_model_of_windows_alone_runs_longer_than_its_blocks_hold() -> None:
    driver = Driver(groups=(CacheGroup(5),), num_blocks=6, max_num_batched_tokens=8)
    driver.add("a", range(60), max_tokens=40)
    driver.run()
    assert driver.requests["a"].num_tokens == 100


def test_a_span_longer_than_a_step_counts() -> None:
    driver = Driver(groups=(CacheGroup(), CacheGroup(5)), num_blocks=16, max_num_batched_tokens=8)
    driver.scheduler.check_admission(40, 2, 1, 12)
    with pytest.raises(CapacityError, match="pieces of up to 16"):
        driver.scheduler.check_admission(40, 2, 1, 16)


def chunks(driver: Driver, name: str) -> list[int]:
    return [c.start for batch in driver.batches for c in batch.chunks if c.request_id == name]


def test_a_hit_needs_the_window_before_it_and_no_more() -> None:
    driver = Driver(groups=FULL_AND_WINDOW, max_num_batched_tokens=100)
    driver.add("a", range(21), max_tokens=1)
    driver.run()
    # Given back by the first chunk, its window's blocks 0 and 1 are the least recently used.
    # A hit at 20 needs keys from 15 on, so block 3; at 8 it would need block 0.
    books = driver.scheduler.blocks
    for block in books.pool.evict(2):
        books._forget(block)
    driver.add("b", range(21), max_tokens=1)
    driver.scheduler.schedule()
    assert driver.requests["b"].num_computed == 20
    driver.scheduler.check_integrity()
    assert driver.requests["b"].tables[1][:3] == [NO_BLOCK] * 3
    driver.scheduler.finish("b")
    driver.add("c", [*range(8), *range(100, 108)], max_tokens=1)
    driver.scheduler.schedule()
    assert driver.requests["c"].num_computed == 0


def test_the_next_turn_of_a_chat_finds_every_block_of_the_turn_before() -> None:
    driver = Driver(groups=FULL_AND_WINDOW, num_blocks=20, max_num_batched_tokens=8)
    first = driver.add("a", range(30), max_tokens=7)
    driver.run()
    driver.add("b", [*first.token_ids, 5, 6, 7], max_tokens=1)
    driver.run()
    assert chunks(driver, "b") == [36]


def test_a_hit_never_ends_inside_a_both_way_span() -> None:
    driver = Driver(groups=FULL_AND_WINDOW)
    driver.add("a", [9] * 20, [image(2, 8, "A")], both_ways=True, max_tokens=1)
    driver.run()
    driver.add("b", [9] * 10 + list(range(10)), [image(2, 8, "A")], both_ways=True, max_tokens=1)
    driver.run()
    assert chunks(driver, "b")[0] == 0


def layers(*windows: int | None) -> CacheSpec:
    return CacheSpec(tuple(LayerCacheSpec(2, 8, 8, window) for window in windows), torch.float32)


class OfSpec(MockModel):
    def __init__(self, spec: CacheSpec, **options: Any) -> None:
        super().__init__(**options)
        self._spec = spec

    def cache_spec(self) -> CacheSpec:
        return self._spec


def test_the_layout_gives_every_group_equally_many_layers() -> None:
    layout = layers(512, 512, None, 512, 512, None).layout()
    assert layout.windows == (None, 512, 512)
    assert layout.num_slots == 2
    assert layout.places == ((1, 0), (1, 1), (0, 0), (2, 0), (2, 1), (0, 1))
    assert len(set(layout.places)) == 6
    assert layers(9, 9).layout().windows == (9,)
    assert layers(3, 9, None).layout().windows == (None, 9, 3)
    # One layer without a window among thirty: no more than eight tables a request.
    assert len(layers(None, *[9] * 30).layout().windows) <= 8
    mixed = CacheSpec((LayerCacheSpec(1, 8, 8, 9), LayerCacheSpec(1, 16, 16)), torch.float32).layout()
    assert (mixed.windows, mixed.num_slots) == ((None,), 2)


def test_memory_is_saved() -> None:
    """Five of six layers slide: the same bytes hold nearly six times the tokens."""
    config = EngineConfig(max_num_batched_tokens=512)
    memory = 50 * 2**20
    sliding, plain = layers(*[512] * 5, None), layers(*[None] * 6)
    limits = resolve_limits(config, sliding, None, memory)
    assert limits.max_model_len > 5.5 * resolve_limits(config, plain, None, memory).max_model_len
    for spec in (sliding, plain):
        num_blocks = resolve_limits(config, spec, None, memory).num_blocks
        assert memory - 64 * spec.bytes_per_token() < cache_bytes(num_blocks, spec, config.block_size) <= memory
    engine = Engine(OfSpec(sliding), ByteTokenizer(), EngineConfig(kv_cache_memory=2**20, block_size=16), identity="m")
    engine.close()
    tensors = {cache.key.data_ptr(): cache for cache in engine._runner._caches}
    assert sum(cache.key.nbytes + cache.value.nbytes for cache in tensors.values()) <= 2**20
    with pytest.raises(ConfigError, match="does not hold two blocks of 64 tokens, which take"):
        resolve_limits(config, sliding, None, 1024)


@given(
    st.sampled_from([(None, 3), (None, 40), (20, 7), (5,), (None, 9, 9, 9)]),
    st.integers(1, 40),
    st.integers(1, 16),
    st.integers(2, 200),
)
@settings(max_examples=60, deadline=None)
def test_what_is_no_longer_than_the_limit_is_admitted(
    windows: tuple[int | None, ...], budget: int, block_size: int, num_blocks: int
) -> None:
    config = EngineConfig(max_num_batched_tokens=budget, block_size=block_size, num_blocks=num_blocks)
    limits = resolve_limits(config, layers(*windows), None, 0)
    assert limits.max_model_len >= num_blocks * block_size
    needed = sum(group.most_blocks(limits.max_model_len, budget, block_size) for group in limits.groups)
    assert needed <= limits.num_blocks


def engine(model: MockModel, **options: Any) -> Engine:
    return Engine(
        model,
        ByteTokenizer(),
        EngineConfig(**{"block_size": 4, "num_blocks": 64, "max_num_batched_tokens": 16} | options),
        identity="m",
    )


@pytest.mark.parametrize("windows", [(None, 7), (7, None), (9, 3), (6, 6), (1, 1)])
@pytest.mark.parametrize("both_ways", [False, True])
def test_every_request_is_as_if_it_were_alone(windows: tuple[int | None, int | None], both_ways: bool) -> None:
    rnd = random.Random(repr(windows))
    requests = []
    for _ in range(9):
        length = rnd.randint(12, 40)
        images = [mock_image(2, 8, rnd.randint(0, 2))] if rnd.random() < 0.7 else []
        sampling = SamplingParams(max_tokens=rnd.randint(1, 25), n=rnd.choice([1, 1, 2]), seed=1, temperature=1.0)
        requests.append((mock_prompt([65] * length, images), sampling))
    roomy = engine(
        MockModel(windows=windows, both_ways=both_ways),
        block_size=64,
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
    )
    alone = [roomy.submit(*request).result(WAIT) for request in requests]
    roomy.close()
    tight = engine(
        MockModel(windows=windows, both_ways=both_ways), num_blocks=18, max_num_batched_tokens=5, max_num_seqs=3
    )
    try:
        for _ in range(2):
            handles = [tight.submit(*request) for request in requests]
            for handle, expected in zip(handles, alone, strict=True):
                output = handle.result(WAIT)
                assert output.token_ids == expected.token_ids
                assert [o.token_ids for o in output.others] == [o.token_ids for o in expected.others]
        short = SamplingParams(max_tokens=2)  # a long answer would take the prompt's blocks away
        twice = [tight.submit(mock_prompt([65] * 30, [mock_image(2, 8)]), short).result(WAIT) for _ in range(2)]
        assert twice[0].token_ids == twice[1].token_ids
        assert 0 < twice[1].usage.cached_tokens <= 28  # what of it stayed, in a cache too small for all
    finally:
        tight.close()
    tight.check_integrity()
    assert tight.stats()["blocks_held"] == 0


@pytest.mark.parametrize("windows", [(None, 5), (5, 5)])
def test_nan_that_moved_out_of_a_window_reaches_nobody(windows: tuple[int | None, int | None]) -> None:
    """Id 90 makes NaN. Where all layers slide it is out of sight in the end, and its request goes well."""
    tight = engine(MockModel(windows=windows, nan_after={90}), num_blocks=9, max_num_batched_tokens=4)
    try:
        good = mock_prompt([65] * 22)
        expected = tight.submit(good, SamplingParams(max_tokens=9)).result(WAIT).token_ids
        for _ in range(4):
            bad = tight.submit(mock_prompt([90, *[66] * 24]), SamplingParams(max_tokens=3))
            if windows[0] is None:
                with pytest.raises(ModelOutputError):
                    bad.result(WAIT)
            else:
                assert len(bad.result(WAIT).token_ids) == 3
            cut_short = tight.submit(mock_prompt([90, *[67] * 24]), SamplingParams(max_tokens=3))
            cut_short.abort()
            assert tight.submit(good, SamplingParams(max_tokens=9)).result(WAIT).token_ids == expected
    finally:
        tight.close()


@pytest.mark.parametrize("cut", [1, 3, 4, 6, 11])
def test_parts_of_a_model_go_by_the_whole_one_s_groups(cut: int) -> None:
    """Pipeline stages: each part's layers lie in groups of their own window, in as few slots as that takes."""
    kinds = [None if number % 6 == 5 else 8 for number in range(12)]
    layers = tuple(LayerCacheSpec(2, 4, 4, window) for window in kinds)
    windows = CacheSpec(layers, torch.float32).layout().windows
    assert windows == (None, 8, 8, 8, 8, 8)
    for part in (layers[:cut], layers[cut:]):
        layout = CacheSpec(part, torch.float32, windows=windows).layout()
        assert layout.windows == windows
        assert [windows[group] for group, _ in layout.places] == [layer.window for layer in part]
        assert len(set(layout.places)) == len(part)
        full = sum(layer.window is None for layer in part)
        assert layout.num_slots == max(full, -(-(len(part) - full) // 5))


def test_parts_of_layers_of_different_shapes_are_one_group() -> None:
    layers = (LayerCacheSpec(2, 4, 4, 8), LayerCacheSpec(1, 4, 4, None))
    windows = CacheSpec(layers, torch.float32).layout().windows
    layout = CacheSpec(layers[:1], torch.float32, windows=windows).layout()
    assert layout.windows == (None,)
    assert layout.places == ((0, 0),)
