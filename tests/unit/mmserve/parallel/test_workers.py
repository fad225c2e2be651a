"""Workers that die, fail or are not needed any more: one clear error within seconds, and no process left behind."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from fixtures.tiny_models.families import FAMILIES
from fixtures.tiny_models.family import build, make_prompt
from fixtures.tiny_models.ranks import TIMEOUT, parallel_engine, workers
from mmserve.errors import EngineDeadError, ModelNotFoundError, WorkerError
from mmserve.parallel.layout import Layout
from mmserve.parallel.workers.crew import Crew, Member, start_local
from mmserve.parallel.workers.meet import host_store, meet
from mmserve.parallel.workers.wire import Hello, Lost, Setup, decode, encode, send
from mmserve.types import SamplingParams

PAIR = Layout(2, 1)
PROMPT = make_prompt(FAMILIES["llama"], [9])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(FAMILIES["llama"], Path(tmp_path_factory.mktemp("llama")))


@pytest.fixture
def members() -> Iterator[list[Member]]:
    with workers(2) as started:
        yield started


def ended(member: Member) -> bool:
    return member.process is not None and member.process.poll() is not None


def setup(folder: str) -> Setup:
    return Setup(
        layout=PAIR,
        rank=1,
        host="127.0.0.1",
        port=1,
        name="test",
        folder=folder,
        dtype="float32",
        device="cpu",
        attention_backend="auto",
        block_size=16,
        replace=True,
        trust_remote_code=False,
        allow_pickled_weights=False,
        ignore_weights=(),
        plan=None,
        timeout=TIMEOUT,
        threads=1,
    )


def test_tensors_go_over_the_wire_as_they_are() -> None:
    tensors = [torch.randn(2, 3).T, torch.ones(2, dtype=torch.bfloat16), torch.empty(0, 4), torch.tensor(True)]
    for tensor in tensors:
        again = decode(encode(tensor))
        assert again.dtype == tensor.dtype
        assert torch.equal(again, tensor)


def test_a_worker_that_dies_before_it_is_up() -> None:
    members = start_local(1)
    crew = Crew(members)
    assert members[0].process is not None
    members[0].process.kill()
    with pytest.raises(WorkerError, match=r"worker of rank 1 \(process \d+\) was ended by SIGKILL"):
        crew.greet([setup("/nowhere")], TIMEOUT)
    crew.kill()


def test_a_worker_that_dies_before_it_comes_to_meet_the_driver() -> None:
    """The driver waits in the store for an address that nobody will ever put there."""
    members = start_local(1)
    crew = Crew(members)
    crew.greet([setup("/nowhere")], TIMEOUT)  # its store is on a port where there is none: it goes no further
    store = host_store("127.0.0.1", TIMEOUT)
    assert members[0].process is not None
    members[0].process.kill()
    began = time.monotonic()
    with pytest.raises(WorkerError, match=r"worker of rank 1 .* was ended by SIGKILL"):
        crew.while_up(lambda: meet(store, "test", PAIR.place(0), torch.device("cpu"), "127.0.0.1", 10.0))
    assert time.monotonic() - began < 8.0
    crew.kill()


def test_what_workers_say_while_the_driver_waits_for_something_else() -> None:
    """Whoever is ready early is heard later; errors are the driver's own, and a worker's at once."""
    ends = [socket.socketpair() for _ in range(2)]
    (ours, theirs), (other, gone) = ([Connection(end.detach()) for end in pair] for pair in ends)
    crew = Crew([Member(1, ours, None), Member(2, other, None)])
    send(theirs, Hello(7, "here"))
    assert crew.while_up(lambda: time.sleep(0.05) or "met") == "met"
    with pytest.raises(ZeroDivisionError):
        crew.while_up(lambda: 1 / 0)
    send(gone, Hello(8, "there"))
    assert sorted(hello.process_id for _, hello in crew.hear_all(TIMEOUT)) == [7, 8]
    send(gone, Lost(ModelNotFoundError("no such model"), "trace"))
    may_end = threading.Event()
    with pytest.raises(ModelNotFoundError, match="no such model"):
        crew.while_up(lambda: may_end.wait(TIMEOUT))
    gone.close()
    with pytest.raises(WorkerError, match="worker of rank 2 is gone: its connection broke"):
        crew.while_up(lambda: may_end.wait(TIMEOUT))
    may_end.set()
    for connection in (ours, theirs, other):
        connection.close()


def test_two_engines_at_once_and_a_worker_killed_in_one(folder: Path, members: list[Member]) -> None:
    """Engines of one process do not meet; one that loses its worker says so, and the other goes on."""
    with (
        parallel_engine(folder, PAIR, members[:1], num_blocks=100) as (one, _),
        parallel_engine(folder, PAIR, [as_rank_1(members[1])], num_blocks=100) as (other, _),
    ):
        long = SamplingParams(max_tokens=400, ignore_eos=True)
        handles = [engine.submit(PROMPT, SamplingParams(max_tokens=8)) for engine in (one, other)]
        first, second = (handle.result(TIMEOUT) for handle in handles)
        assert first.token_ids == second.token_ids
        (worker,) = one.describe()["workers"]
        assert worker["weight_bytes"] == 4 * worker["parameters"]  # float32
        assert worker["cache_bytes"] > 0
        running = one.submit(PROMPT, long)
        next(iter(running))
        victim = members[0].process
        assert victim is not None
        victim.send_signal(signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"worker of rank 1 .* was ended by SIGKILL"):
            running.result(TIMEOUT)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            one.submit(PROMPT, long)
        assert other.submit(PROMPT, SamplingParams(max_tokens=8)).result(TIMEOUT).token_ids == first.token_ids
    assert ended(members[0])
    assert not ended(members[1])
    assert not any(thread.name == "mmserve-engine" for thread in threading.enumerate())


def as_rank_1(member: Member) -> Member:
    return Member(1, member.connection, member.process)


def test_what_a_worker_fails_with_is_what_the_driver_hears(tmp_path: Path) -> None:
    members = start_local(1)
    crew = Crew(members)
    store = host_store("127.0.0.1", TIMEOUT)
    alone = setup(str(tmp_path / "missing"))
    fields = {name: getattr(alone, name) for name in alone.__slots__}
    crew.tell([1], Setup(**{**fields, "layout": Layout(1, 1), "rank": 0, "port": store.port}))
    crew.hear(1, TIMEOUT)  # it is up
    with pytest.raises(ModelNotFoundError, match="missing") as caught:
        crew.hear(1, TIMEOUT)
    assert "in the worker of rank 1" in str(caught.value.__cause__)
    crew.close()
    assert ended(members[0])
