"""The scheduler, with ints: budgets, order, chunks, spans, images, hits, preemption."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scheduler_driver import Driver, image

from mmserve.cache.groups import CacheGroup
from mmserve.engine.batch import ScheduledBatch
from mmserve.engine.scheduler import PLACES_PER_PRIORITY
from mmserve.errors import CapacityError


def lens(batch: ScheduledBatch) -> dict[str, tuple[int, int]]:
    return {c.request_id: (c.start, c.num_tokens) for c in batch.chunks}


def test_imports_no_torch() -> None:
    modules = "mmserve.engine.scheduler, mmserve.engine.admission, mmserve.engine.answer, mmserve.engine.handle"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_prompt_is_computed_in_chunks_and_then_token_by_token() -> None:
    driver = Driver(max_num_batched_tokens=8)
    driver.add("a", range(20))
    assert [lens(batch).get("a") for batch in driver.run()] == [(0, 8), (8, 8), (16, 4), (20, 1), (21, 1), None]
    assert driver.batches[-1].finished == ("a",)


def test_decodes_come_before_a_long_prompt_and_share_the_step_with_it() -> None:
    driver = Driver(max_num_batched_tokens=8)
    driver.add("a", range(4), max_tokens=5)
    driver.step()
    driver.add("b", range(100, 120))
    assert lens(driver.step()) == {"a": (4, 1), "b": (0, 7)}
    assert lens(driver.step()) == {"a": (5, 1), "b": (7, 7)}


def test_the_line_is_first_come_first_served() -> None:
    driver = Driver(max_num_seqs=1)
    for name in "abc":
        driver.add(name, range(5))
    order = [new.request_id for batch in driver.run() for new in batch.new]
    assert order == ["a", "b", "c"]


def test_a_better_priority_overtakes_but_not_for_ever() -> None:
    driver = Driver(max_num_seqs=1, num_blocks=4)
    driver.add("low", range(4), priority=1, max_tokens=1)
    for place in (1, PLACES_PER_PRIORITY - 1, PLACES_PER_PRIORITY + 1):
        driver.add(f"{place}", range(4), max_tokens=1, arrival=place)
    order = [new.request_id for batch in driver.run() for new in batch.new]
    assert order == ["1", "999", "low", "1001"]


def test_the_first_that_does_not_fit_stops_the_line() -> None:
    driver = Driver(num_blocks=8)
    driver.add("a", range(16), max_tokens=8)
    driver.step()
    driver.add("big", range(100, 120), max_tokens=1)
    driver.add("small", range(200, 202), max_tokens=1)
    assert set(lens(driver.step())) == {"a"}
    order = [new.request_id for batch in driver.run() for new in batch.new]
    assert order == ["big", "small"]


def test_the_newest_gives_way_and_comes_back() -> None:
    driver = Driver(num_blocks=6, block_size=4)
    driver.add("old", range(8), max_tokens=12)
    driver.add("new", range(100, 107), max_tokens=8)
    batches = driver.run()
    assert [name for batch in batches for name in batch.preempted] == ["new"]
    assert driver.requests["new"].num_preemptions == 1
    assert driver.requests["new"].num_tokens == 15
    restarts = [c.request_id for batch in batches for c in batch.chunks if c.restarted]
    assert restarts == ["old", "new", "new"]


def test_a_second_equal_prompt_computes_only_what_is_not_in_full_blocks() -> None:
    driver = Driver()
    driver.add("a", range(10))
    driver.run()
    request = driver.add("b", range(10))
    assert lens(driver.step()) == {"b": (8, 2)}
    assert request.num_cached == 8


def test_at_least_one_token_is_computed() -> None:
    driver = Driver()
    driver.add("a", range(8))
    driver.run()
    driver.add("b", range(8))
    assert lens(driver.step()) == {"b": (4, 4)}


def test_blocks_are_shared_while_their_first_owner_still_runs_but_only_once_written() -> None:
    driver = Driver()
    driver.add("a", range(9), max_tokens=9)
    driver.add("b", range(9))
    assert lens(driver.step()) == {"a": (0, 9), "b": (0, 7)}
    driver.add("c", range(9))
    driver.step()
    assert lens(driver.batches[-1])["c"] == (8, 1)


def test_the_next_turn_of_a_chat_finds_every_full_block_of_the_turn_before() -> None:
    driver = Driver()
    first = driver.add("a", range(10), max_tokens=7)
    driver.run()
    driver.add("b", [*first.token_ids, 5, 6, 7])
    # 17 tokens, of which the last was never computed: 4 full blocks.
    assert lens(driver.step()) == {"b": (16, 4)}


def test_equal_placeholders_of_other_images_are_no_hit() -> None:
    driver = Driver()
    ids = [9] * 13
    driver.add("a", ids, [image(0, 10, "A")])
    driver.run()
    assert driver.add("b", ids, [image(0, 10, "B")])
    assert lens(driver.step()) == {"b": (0, 13)}
    driver.run()
    driver.add("c", ids, [image(1, 10, "A")])
    assert lens(driver.step()) == {"c": (0, 13)}
    driver.run()
    driver.add("d", ids, [image(0, 10, "A")])
    assert lens(driver.step()) == {"d": (12, 1)}


def test_a_hit_inside_a_causal_image_needs_its_rows_and_one_past_it_does_not() -> None:
    driver = Driver(encoder_cache_memory=0)
    ids = [9] * 15
    driver.add("a", ids, [image(2, 8, "A")], max_tokens=1)
    driver.run()
    assert driver.encodes == ["A"]
    driver.add("b", [*ids[:10], 1, 2, 3], [image(2, 8, "A")], max_tokens=1)
    assert lens(driver.step()) == {"b": (8, 5)}
    assert driver.encodes == ["A", "A"]
    driver.run()
    driver.add("c", ids, [image(2, 8, "A")], max_tokens=1)
    assert lens(driver.step()) == {"c": (12, 3)}
    assert driver.encodes == ["A", "A"]


def test_a_hit_never_ends_inside_a_both_way_span() -> None:
    driver = Driver()
    ids = [9] * 20
    driver.add("a", ids, [image(2, 8, "A")], both_ways=True, max_tokens=1)
    driver.run()
    driver.add("b", [*ids[:10], *range(10)], [image(2, 8, "A")], both_ways=True, max_tokens=1)
    assert lens(driver.step()) == {"b": (0, 16)}


@pytest.mark.parametrize("budget", [4, 8, 10, 16, 20])
def test_a_both_way_span_is_never_cut_whatever_the_budget(budget: int) -> None:
    driver = Driver(max_num_batched_tokens=budget, num_blocks=64)
    driver.add("a", range(30), [image(5, 16, "A")], both_ways=True)
    driver.add("b", range(100, 130), [image(3, 16, "B")], both_ways=True)
    driver.run()  # the driver checks every border
    assert driver.requests["b"].num_tokens == 33


def test_an_image_is_encoded_once_for_all_its_chunks_and_all_who_ask() -> None:
    driver = Driver(max_num_batched_tokens=6)
    driver.add("a", [9] * 20, [image(1, 15, "A")])
    driver.add("b", [8] + [9] * 16, [image(2, 15, "A")])
    driver.run()
    assert driver.encodes == ["A"]


def test_no_more_images_in_a_step_than_allowed() -> None:
    driver = Driver(max_images_per_step=2)
    driver.add("a", [9] * 16, [image(4 * n, 4, f"{n}") for n in range(4)])
    assert lens(driver.step()) == {"a": (0, 8)}
    assert lens(driver.step()) == {"a": (8, 8)}


@pytest.mark.parametrize("capacity", [0, 35, 60])
@pytest.mark.parametrize("both_ways", [False, True])
def test_images_beyond_the_budget_still_get_through(capacity: int, both_ways: bool) -> None:
    """Rows take 10 bytes: an image of 5 tokens does not fit 35, two of 4 do not fit 60."""
    driver = Driver(encoder_cache_memory=capacity, max_num_batched_tokens=7, num_blocks=64)
    for name in "abc":
        images = [image(1, 5, f"{name}1"), image(6, 4, f"{name}2"), image(11, 4, f"{name}3")]
        driver.add(name, [9] * 16, images, both_ways=both_ways)
    driver.run()
    assert all(request.num_tokens == 19 for request in driver.requests.values())
    assert driver.scheduler.images.ledger.held_bytes == 0


def test_a_span_of_several_images_over_every_bound_gets_through() -> None:
    driver = Driver(max_images_per_step=1, encoder_cache_memory=10, max_num_batched_tokens=4)
    request = driver.add("a", [9] * 16, [image(4 * n, 4, f"{n}") for n in range(4)])
    request.spans = ((0, 16),)
    assert lens(driver.step()) == {"a": (0, 16)}
    driver.run()


def test_an_aborted_request_leaves_nothing_behind_at_any_stage() -> None:
    for stage in range(7):
        driver = Driver(max_num_batched_tokens=5)
        driver.add("a", [9] * 14, [image(1, 10, "A")], max_tokens=4)
        for _ in range(stage):
            driver.step()
        driver.scheduler.finish("a")
        driver.scheduler.check_integrity()
        assert driver.scheduler.blocks.pool.num_held == 0
        assert driver.scheduler.images.ledger.held_bytes == 0
        driver.run()
        assert not driver.scheduler.has_work()


def test_aborting_one_owner_of_an_image_keeps_it_for_the_other() -> None:
    driver = Driver(max_num_batched_tokens=8)
    driver.add("a", [9] * 14, [image(1, 12, "A")])
    driver.add("b", [8] + [9] * 14, [image(2, 12, "A")])
    driver.step()
    driver.scheduler.finish("a")
    driver.run()
    assert driver.encodes == ["A"]


def test_a_broken_image_fails_those_who_need_it_and_is_tried_again_later() -> None:
    driver = Driver()
    driver.broken_images = {"A"}
    driver.add("a", [9] * 6, [image(1, 4, "A")])
    driver.add("b", range(6))
    driver.run()
    assert driver.requests["a"].num_tokens == 6
    assert driver.requests["b"].num_tokens == 9
    driver.broken_images = set()
    driver.add("c", [9] * 6, [image(1, 4, "A")])
    driver.run()
    assert driver.requests["c"].num_tokens == 9


def test_what_a_failed_request_computed_is_never_a_hit() -> None:
    driver = Driver(max_num_batched_tokens=8)
    driver.add("a", range(20))
    driver.step()
    driver.scheduler.finish("a", poisoned=True)
    driver.add("b", range(20))
    assert lens(driver.step()) == {"b": (0, 8)}


def test_little_of_the_cache_is_wasted() -> None:
    """At a thousand tokens a request, blocks of 64 hold less than 4 % of nothing."""
    blocks = Driver(block_size=64).scheduler.blocks
    lengths = range(1000 - 64, 1000 + 64)
    held = sum(blocks.most(length, 2048) * 64 for length in lengths)
    assert 1 - sum(lengths) / held < 0.04


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    driver = Driver(num_blocks=4, block_size=4, max_model_len=30)
    driver.scheduler.check_admission(10, 7)
    with pytest.raises(CapacityError, match=r"10 prompt tokens and max_tokens 8 need 5 cache blocks of 4 tokens.* 4"):
        driver.scheduler.check_admission(10, 8)
    with pytest.raises(CapacityError, match="28 tokens and max_tokens is 3: 31 together, but max_model_len is 30"):
        driver.scheduler.check_admission(28, 3)


prompts = st.tuples(
    st.integers(1, 24),  # length
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12), st.sampled_from("ABC")), max_size=3),
    st.booleans(),  # both ways
    st.integers(1, 6),  # max_tokens
    st.integers(-1, 1),  # priority
    st.integers(0, 3),  # steps until the next one comes
    st.booleans(),  # aborted?
)


@example(  # a request waits for the budget while another writes where its window was
    mix=[
        (16, [(5, 2, "B"), (1, 1, "A")], True, 3, -1, 2, False),
        (11, [(4, 8, "A")], False, 3, -1, 0, False),
        (11, [(4, 5, "C"), (4, 11, "B"), (0, 7, "C")], False, 3, 0, 1, False),
    ],
    block_size=1,
    budget=2,
    seqs=2,
    images=3,
    memory=100,
    spare=0,
    windows=(7, 1),
)
@given(
    st.lists(prompts, min_size=1, max_size=8),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 12),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([0, 40, 100, 1000]),
    st.integers(0, 10),
    st.sampled_from([(None,), (None,), (None, 5), (None, 9, 2), (3,), (7, 1)]),
)
@settings(max_examples=120, deadline=None)
def test_any_mix_runs_to_its_end_within_every_bound(
    mix: list[tuple],
    block_size: int,
    budget: int,
    seqs: int,
    images: int,
    memory: int,
    spare: int,
    windows: tuple[int | None, ...],
) -> None:
    num_blocks = -(-(30 + spare) // block_size)
    driver = Driver(
        block_size=block_size,
        num_blocks=num_blocks * len(windows),
        groups=tuple(map(CacheGroup, windows)),
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        max_images_per_step=images,
        encoder_cache_memory=memory,
    )
    aborted = []
    for number, (length, pictures, both_ways, max_tokens, priority, pause, abort) in enumerate(mix):
        items, at = [], 0
        for gap, size, key in pictures:
            if at + gap + size > length:
                break
            items.append(image(at + gap, size, f"{key}{size}"))
            at += gap + size
        name = f"{number}"
        driver.add(name, [9] * length, items, max_tokens=max_tokens, both_ways=both_ways, priority=priority)
        for _ in range(pause):
            if driver.scheduler.has_work():
                driver.step()
        if abort:
            aborted.append(name)
            driver.scheduler.finish(name)
    driver.run()
    for name, request in driver.requests.items():
        if name not in aborted:
            assert request.num_tokens == request.num_prompt + driver.wanted[name]
    assert driver.scheduler.blocks.pool.num_held == 0
    assert driver.scheduler.images.ledger.held_bytes == 0
    assert driver.images == set(driver.scheduler.images.ledger._entries)
