"""Ranks that a launcher has started: who is who, who may come, and that all hold the same model."""

from __future__ import annotations

import shutil
import socket
import threading
from multiprocessing.connection import Client
from pathlib import Path

import pytest
import torch.distributed as dist

from mmserve.errors import ConfigError, WorkerError
from mmserve.model.fingerprint import differences, fingerprint
from mmserve.parallel.layout import Layout
from mmserve.parallel.workers import launch as launching
from mmserve.parallel.workers.launch import Launch, find_launch, gather
from mmserve.parallel.workers.wire import Arrival, encode

FOUR = Layout(2, 2)
ENVIRONMENT = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "host0", "MASTER_PORT": "29500"}


def test_what_the_launcher_says() -> None:
    assert find_launch({}, FOUR) is None
    assert find_launch({"WORLD_SIZE": "1", "RANK": "0"}, FOUR) is None
    assert find_launch(ENVIRONMENT, FOUR) == Launch(1, 4, None, "host0")
    assert find_launch({**ENVIRONMENT, "LOCAL_RANK": "0"}, FOUR) == Launch(1, 4, 0, "host0")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"WORLD_SIZE": "3"}, r"tensor_parallel 2 x pipeline_parallel 2 take 4 ranks, and the launcher started 3"),
        ({"MASTER_ADDR": "", "MASTER_PORT": ""}, "MASTER_ADDR, MASTER_PORT is not there: start it with torchrun"),
        ({"RANK": "4"}, "RANK 4 is not one of 4 ranks, 0 to 3"),
        ({"RANK": "one"}, "RANK in the environment is a number, not 'one'"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT in the environment is a number"),
    ],
)
def test_a_launch_that_does_not_fit(change: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_launch({**ENVIRONMENT, **change}, FOUR)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.HashStore:
    made = dist.HashStore()
    monkeypatch.setattr(launching, "_store", lambda timeout: made)
    return made


def test_only_who_has_the_key_may_come_and_only_once(store: dist.HashStore) -> None:
    """A port scanner is turned away; what it sends is never unpickled."""
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(gather(Launch(0, 2, 0, "host0"), 60.0, {})))
    thread.start()
    _, port, key = store.get("mmserve/address").decode().split()
    address = ("127.0.0.1", int(port))
    with socket.create_connection(address) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with Client(address) as other:
        other.send_bytes(b"x" * 32)
        other.send_bytes(b"not a pickle")
    with Client(address) as rank:
        rank.send_bytes(bytes.fromhex(key))
        rank.send_bytes(encode(Arrival(1, 0, 7, socket.gethostname())))
        thread.join(60)
    ((members, host),) = found  # type: ignore[misc]
    assert host == "127.0.0.1"
    assert [str(member) for member in members] == [f"the worker of rank 1 (process 7 on {socket.gethostname()})"]
    members[0].connection.close()
    with pytest.raises(ConfigError, match="serve one pipeline and end with it, and this is the second"):
        gather(Launch(0, 2, 0, "host0"), 60.0, {})


def test_a_rank_whose_script_says_something_else_is_named(store: dist.HashStore) -> None:
    def come() -> None:
        store.wait(["mmserve/address"])
        _, port, key = store.get("mmserve/address").decode().split()
        with Client(("127.0.0.1", int(port))) as rank:
            rank.send_bytes(bytes.fromhex(key))
            rank.send_bytes(encode(Arrival(1, 0, 7, "host1", {"dtype": "float32", "pipeline_parallel": "2"})))
            closed.append(rank.poll(60))

    closed: list[bool] = []
    thread = threading.Thread(target=come)
    thread.start()
    said = (
        r"worker of rank 1 \(process 7 on host1\) was started with dtype=float32, pipeline_parallel=2, "
        r"and rank 0 with dtype=auto, pipeline_parallel=1: all ranks run the same script"
    )
    with pytest.raises(ConfigError, match=said):
        gather(Launch(0, 2, 0, "host0"), 60.0, {"dtype": "auto", "pipeline_parallel": "1"})
    thread.join(60)
    assert closed == [True]  # the connection's end can be read


def test_a_rank_that_does_not_come(store: dist.HashStore) -> None:
    with pytest.raises(WorkerError, match=r"rank 1, 2 did not come within 0\.05 s"):
        gather(Launch(0, 3, 0, "host0"), 0.05, {})


def test_another_training_of_the_same_model_is_noticed(tmp_path: Path) -> None:
    from mmserve.demo import demo_model_folder

    here, there = demo_model_folder(), tmp_path / "there"
    shutil.copytree(here, there)
    assert differences(fingerprint(here), fingerprint(there)) == []
    weights = there / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert differences(fingerprint(here), fingerprint(there)) == ["model.safetensors"]
