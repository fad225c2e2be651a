"""Ranks of one host exchange through memory: the same bytes on all, and an error at once when one is gone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures.tiny_models.thread_ranks import on_ranks
from mmserve.errors import ConfigError
from mmserve.kernels.library import native_module
from mmserve.parallel.group import ExchangeError, Group, make_group
from mmserve.parallel.shared_memory import SWITCH
from mmserve.parallel.workers.crew import child_environment
from mmserve.parallel.workers.meet import host_store, join_store

pytestmark = [
    pytest.mark.skipif(native_module() is None, reason="the exchange is compiled"),
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no files in memory"),
]
TIMEOUT = 60.0
PIECE = 256 * 1024


def in_memory(size: int, work: Callable[[Group], Any]) -> list[Any]:
    """What `work` gives on each rank, a thread each."""

    def run(group: Group) -> Any:
        group.share_memory(TIMEOUT)
        assert (group.through, group.reason) == ("shared memory", "all ranks are on one host")
        return work(group)

    return on_ranks(size, run)


def parts(size: int, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_are_in_the_order_of_ranks_and_equal_on_all(size: int, dtype: torch.dtype) -> None:
    """Of nothing, one value, a row, sizes that no vector divides, a whole piece and one value more, several pieces."""
    piece = PIECE // dtype.itemsize
    counts = [0, 1, 576, 1003, 4 * 8192 + 5, piece, piece + 1, 3 * piece - 7]
    given = {count: parts(size, count, dtype) for count in counts}
    found = in_memory(size, lambda group: [group.all_reduce(given[count][group.rank].clone()) for count in counts])
    for index, count in enumerate(counts):
        total = torch.zeros(count)
        for part in given[count]:
            total = total + part.float()
        for rank in range(size):
            assert torch.equal(found[rank][index], total.to(dtype)), (count, rank)


@pytest.mark.parametrize("through", ["memory", "gloo"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sum_onto_rows_is_rounded_first(size: int, dtype: torch.dtype, through: str) -> None:
    """What is added need not be the same on ranks; small and shared sums, through memory and through gloo."""
    counts = [1, 1003, PIECE // dtype.itemsize + 5]
    given = {count: [part / 64 for part in parts(size + 1, count, dtype)] for count in counts}

    def work(group: Group) -> None:
        for count in counts:
            part, onto = given[count][group.rank], given[count][size] * (group.rank + 1)
            alone = group.all_reduce(part.clone())
            kept = onto.clone()
            assert torch.equal(group.all_reduce(part.clone(), onto), alone + onto)
            assert torch.equal(onto, kept)

    (in_memory if through == "memory" else on_ranks)(size, work)


def test_a_sum_onto_something_else_is_refused() -> None:
    def work(group: Group) -> None:
        for onto in (torch.ones(4), torch.ones(3).bfloat16(), torch.ones(3, 2)[:, 0]):
            with pytest.raises(ExchangeError, match=r"onto|contiguous"):
                group.all_reduce(torch.ones(3), onto)
        assert float(group.all_reduce(torch.ones(3), torch.ones(3))[0]) == 3.0

    in_memory(2, work)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.float16], ids=str)
def test_other_elements_are_summed_too(size: int, dtype: torch.dtype) -> None:
    for total in in_memory(size, lambda group: group.all_reduce(torch.arange(5).to(dtype) + group.rank)):
        assert torch.equal(total, (size * torch.arange(5) + size * (size - 1) // 2).to(dtype))


def test_rows_that_are_not_contiguous_are_summed_in_a_copy() -> None:
    given = torch.arange(12.0).reshape(3, 4)
    for total in in_memory(2, lambda group: group.all_reduce(given.clone().T)):
        assert torch.equal(total, 2 * given.T)


@pytest.mark.parametrize("size", [2, 3])
def test_gathers_and_broadcasts_of_any_elements_and_sizes(size: int) -> None:
    def work(group: Group) -> None:
        for dtype in (torch.uint8, torch.bool, torch.int64, torch.bfloat16, torch.float32):
            for count in (0, 1, 7, 2 * PIECE // dtype.itemsize + 3):
                given = [part.gt(0).to(dtype) * (rank + 1) for rank, part in enumerate(parts(size, count, dtype))]
                everyone = group.all_gather(given[group.rank])
                assert all(map(torch.equal, everyone, given))
                for source in range(size):
                    mine = given[group.rank].clone()
                    assert group.broadcast(mine, source) is mine
                    assert torch.equal(mine, given[source])

    in_memory(size, work)


def test_ranks_that_come_late_and_kinds_that_change_do_not_mix() -> None:
    """Each rank is the late one in turn, longer than ranks spin."""

    def work(group: Group) -> list[float]:
        totals = []
        for turn in range(30):
            if turn % 6 == group.rank:
                time.sleep(0.004)
            totals.append(float(group.all_reduce(torch.full((turn * 999 + 1,), float(group.rank + turn)))[-1]))
            gathered = group.all_gather(torch.tensor([turn, group.rank]))
            assert [entry.tolist() for entry in gathered] == [[turn, rank] for rank in range(3)]
        return totals

    assert in_memory(3, work) == [[3.0 * turn + 3 for turn in range(30)]] * 3


def test_ranks_that_ask_for_different_things_hear_it() -> None:
    def work(group: Group) -> str:
        with pytest.raises(ExchangeError) as caught:
            group.all_reduce(torch.ones(3 + group.rank))
        with pytest.raises(ExchangeError, match="left"):
            group.all_reduce(torch.ones(3))
        return str(caught.value)

    assert "exchanges something else than" in "".join(in_memory(2, work))


def test_a_rank_whose_group_is_dropped_has_left() -> None:
    groups: dict[int, Group] = {}

    def meet(group: Group) -> None:
        groups[group.rank] = group

    in_memory(2, meet)
    del groups[1]
    began = time.monotonic()
    with pytest.raises(ExchangeError, match="rank 1 has left"):
        groups[0].all_reduce(torch.ones(3))
    assert time.monotonic() - began < TIMEOUT / 4


def test_a_rank_that_is_silent_is_given_up() -> None:
    def work(group: Group) -> None:
        group.share_memory(0.2)
        if group.rank == 0:
            with pytest.raises(ExchangeError, match="rank 1 was silent"):
                group.all_reduce(torch.ones(3))
        else:
            time.sleep(1)
            group.all_reduce(torch.ones(3))  # which rank 0 had come to
            with pytest.raises(ExchangeError, match="rank 0 has left"):
                group.all_reduce(torch.ones(3))

    on_ranks(2, work)


def test_one_rank_that_can_not_is_enough_to_decline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "off")

    def work(group: Group) -> tuple[str, str, float]:
        group.share_memory(TIMEOUT)
        return group.through, group.reason, float(group.all_reduce(torch.ones(1)))

    assert on_ranks(2, work) == [("gloo", f"switched off by {SWITCH}", 2.0)] * 2


def test_a_switch_that_says_something_else_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    with pytest.raises(ConfigError, match="MMSERVE_SHARED_MEMORY in the environment is 'on' or 'off', not '0'"):
        Group(None, 0, 2).share_memory(TIMEOUT)
    monkeypatch.setenv(SWITCH, "")
    in_memory(2, lambda group: None)


def test_ranks_of_other_hosts_decline(monkeypatch: pytest.MonkeyPatch) -> None:
    from mmserve.parallel import shared_memory

    offers = [shared_memory._Offer("", "here", 1), shared_memory._Offer("", "there", 1)]
    assert shared_memory._refusal(offers) == "rank 1 is on another host or in another container than rank 0"
    assert shared_memory._refusal(offers[:1] * 2) is None
    monkeypatch.setattr(shared_memory, "native_module", lambda: None)
    assert "no compiled kernels" in str(shared_memory._missing())


PEER = """
import sys, time
import torch
from mmserve.parallel.group import make_group
from mmserve.parallel.workers.meet import join_store

torch.set_num_threads(1)
store = join_store("127.0.0.1", int(sys.argv[1]), 60.0)
group = make_group(store, "peers", 0, 3, torch.device("cpu"), "127.0.0.1", 60.0)
group.share_memory(60.0)
assert float(group.all_reduce(torch.ones(100_000))[-1]) == 3.0
print(group.through, flush=True)
time.sleep(60)
"""


def files_in_memory() -> set[str]:
    folder = Path("/dev/shm")
    return set(os.listdir(folder)) if folder.is_dir() else set()


def test_peers_of_a_killed_process_hear_it_at_once_and_nothing_stays() -> None:
    """A process that nobody has waited for yet is dead all the same; its peers wait for it, or for each other."""
    before = files_in_memory()
    store = host_store("127.0.0.1", TIMEOUT)
    heard: list[tuple[str, float]] = []

    def peer(rank: int) -> None:
        own = join_store("127.0.0.1", store.port, TIMEOUT)
        group = make_group(own, "peers", rank, 3, torch.device("cpu"), "127.0.0.1", TIMEOUT)
        group.share_memory(TIMEOUT)
        group.all_reduce(torch.ones(100_000))
        try:
            group.all_reduce(torch.ones(3))
        except ExchangeError as error:
            heard.append((str(error), time.monotonic()))

    peers = [threading.Thread(target=peer, args=(rank,)) for rank in (1, 2)]
    for thread in peers:
        thread.start()
    command = [sys.executable, "-c", PEER, str(store.port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=child_environment()) as victim:
        assert victim.stdout is not None
        assert victim.stdout.readline() == "shared memory\n"
        assert not {name for name in files_in_memory() - before if "mmserve" in name}
        time.sleep(0.1)  # the others wait by now
        began = time.monotonic()
        victim.kill()
        for thread in peers:
            thread.join(TIMEOUT)
    assert len(heard) == 2
    assert max(when for _, when in heard) - began < TIMEOUT / 4
    assert any("rank 0's process has ended" in said for said, _ in heard)
    assert all("an exchange between ranks broke: rank " in said for said, _ in heard)
    assert not {name for name in files_in_memory() - before if "mmserve" in name}


def test_a_copy_of_a_rank_that_ends_has_not_left() -> None:
    """A fork of the user's, which drops what it has."""

    def work(group: Group) -> float:
        if group.rank == 0:
            child = os.fork()
            if child == 0:
                group._memory.leave()  # type: ignore[union-attr]
                os._exit(0)
            os.waitpid(child, 0)
        return float(group.all_reduce(torch.ones(1)))

    assert in_memory(2, work) == [2.0, 2.0]
