"""Cache blocks: one place each, constant time, nothing lost."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mmserve.cache.block_pool import BlockPool


def test_allocate_takes_exactly_what_is_free() -> None:
    pool = BlockPool(3)
    assert sorted(pool.allocate(3)) == [0, 1, 2]
    assert pool.num_free == 0
    with pytest.raises(RuntimeError, match="1 blocks wanted, 0 free"):
        pool.allocate(1)


def test_a_failed_allocation_takes_nothing() -> None:
    pool = BlockPool(3)
    with pytest.raises(RuntimeError):
        pool.allocate(4)
    assert pool.num_free == 3


def test_a_shared_block_is_free_after_its_last_holder() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.share(blocks)
    pool.release(blocks)
    assert pool.num_available == 0
    pool.release(blocks)
    assert pool.num_free == 1


def test_released_content_worth_keeping_is_cached_and_can_be_held_again() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    pool.keep(blocks[0])
    pool.release(blocks)
    assert (pool.num_free, pool.num_cached) == (1, 1)
    pool.share([blocks[0]])
    assert (pool.num_cached, pool.num_held) == (0, 1)


def test_least_recently_released_is_evicted_first() -> None:
    pool = BlockPool(3)
    a, b, c = pool.allocate(3)
    for block in (a, b, c):
        pool.keep(block)
    pool.release([c, a, b])
    pool.share([c])
    pool.release([c])
    assert pool.evict(2) == [a, b]
    assert (pool.num_free, pool.num_cached) == (2, 1)


def test_a_forgotten_cached_block_is_free() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.keep(blocks[0])
    pool.release(blocks)
    pool.forget(blocks[0])
    assert (pool.num_free, pool.num_cached) == (1, 0)


@pytest.mark.parametrize("wrong", ["release", "share", "keep"])
def test_nobody_can_use_a_free_block(wrong: str) -> None:
    pool = BlockPool(1)
    with pytest.raises(RuntimeError):
        getattr(pool, wrong)(0 if wrong == "keep" else [0])


def test_integrity_check_sees_a_block_in_two_places() -> None:
    pool = BlockPool(2)
    pool._cached[pool._free[0]] = None
    with pytest.raises(RuntimeError, match="free and cached"):
        pool.check_integrity()


class CountingList(list[int]):
    """A list that counts the elements its operations move."""

    moved = 0

    def __getitem__(self, where: Any) -> Any:
        found = super().__getitem__(where)
        self.moved += len(found) if isinstance(where, slice) else 1
        return found

    def __delitem__(self, where: Any) -> None:
        first, stop, _ = where.indices(len(self))
        self.moved += len(self) - first  # what is deleted, and what moves up behind it
        assert stop == len(self), "a stack gives from its end alone"
        super().__delitem__(where)

    def __setitem__(self, where: Any, value: Any) -> None:
        self.moved += 1
        super().__setitem__(where, value)

    def append(self, value: int) -> None:
        self.moved += 1
        super().append(value)

    def _never(self, *_: Any) -> Any:
        raise AssertionError("an operation whose time grows with the pool")

    pop = insert = remove = index = count = sort = __contains__ = __iter__ = __eq__ = _never


def work_of(num_blocks: int, at_a_time: int, keeps: bool) -> int:
    """Elements moved and lines run by the pool while each of its blocks is allocated, released, evicted and taken."""
    pool = BlockPool(num_blocks)
    free, counts = CountingList(pool._free), CountingList(pool._refcounts)
    pool._free, pool._refcounts = free, counts
    lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if frame.f_globals is not BlockPool.allocate.__globals__:
            return None
        lines += event == "line"
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        held = [pool.allocate(at_a_time) for _ in range(num_blocks // at_a_time)]
        for blocks in held:
            for block in blocks if keeps else ():
                pool.keep(block)
            pool.release(blocks)
        if keeps:
            assert len(pool.evict(num_blocks)) == num_blocks
        assert len(pool.allocate(num_blocks)) == num_blocks
    finally:
        sys.settrace(previous)
    return free.moved + counts.moved + lines


@pytest.mark.parametrize("at_a_time", [1, 100])
@pytest.mark.parametrize("keeps", [False, True])
def test_a_hundred_thousand_blocks_take_a_hundred_times_the_work_of_a_thousand(at_a_time: int, keeps: bool) -> None:
    few, many = (work_of(count, at_a_time, keeps) for count in (1_000, 100_000))
    assert few > 1_000
    assert many <= 100 * few
    assert many <= 60 * 100_000


class PoolMachine(RuleBasedStateMachine):
    """Any order of operations, against a model of plain lists."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6)
        self.holds: list[int] = []
        self.kept: list[int] = []

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        if count > self.pool.num_free:
            for block in self.pool.evict(count - self.pool.num_free):
                self.kept.remove(block)
        if count > self.pool.num_free:
            with pytest.raises(RuntimeError):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert not set(blocks) & set(self.holds)
        self.holds += blocks

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.holds))
        self.pool.share([block])
        self.holds.append(block)

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data: st.DataObject, keep: bool) -> None:
        block = data.draw(st.sampled_from(self.holds))
        if keep:
            self.pool.keep(block)
            if block not in self.kept:
                self.kept.append(block)
        self.holds.remove(block)
        self.pool.release([block])

    @precondition(lambda self: set(self.kept) - set(self.holds))
    @rule(data=st.data())
    def revive(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(set(self.kept) - set(self.holds))))
        self.pool.share([block])
        self.holds.append(block)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.kept))
        self.kept.remove(block)
        self.pool.forget(block)

    @invariant()
    def books_agree(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_held == len(set(self.holds))
        assert self.pool.num_cached == len(set(self.kept) - set(self.holds))
        for block in range(6):
            assert self.pool.refcount(block) == self.holds.count(block)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPoolMachine = PoolMachine.TestCase
