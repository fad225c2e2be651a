"""Several ranks as a user starts them: under torchrun, and with Ctrl-C in the middle."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from mmserve import MMPipeline

ROOT = Path(__file__).parents[2]
TIMEOUT = 300
SCRIPT = """
from mmserve import MMPipeline

print("every rank runs this")
with MMPipeline(dtype="float32", tensor_parallel=2, num_blocks=32, progress="off") as pipe:
    print("ids", pipe.generate(None, "Say something.", temperature=0.0, max_tokens=8, ignore_eos=True).token_ids)
    assert len(pipe.describe()["engine"]["workers"]) == 1
    pipe.close()
print("rank 0 alone")
"""
ENDLESS = """
import signal
from mmserve import MMPipeline

signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests in the background ignores it

with MMPipeline(dtype="float32", tensor_parallel=2, num_blocks=2000, progress="off") as pipe:
    for _ in range(1000):
        for delta in pipe.stream(None, "Say something.", max_tokens=400, ignore_eos=True):
            print("begun", flush=True)
"""


def _environment() -> dict[str, str]:
    launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    own = {name: value for name, value in os.environ.items() if name not in launched}
    return {**own, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def test_torchrun_gives_what_one_process_gives(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(
        launcher, capture_output=True, text=True, env=_environment(), timeout=TIMEOUT, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    with MMPipeline(dtype="float32", num_blocks=32, progress="off") as pipe:
        answer = pipe.generate(None, "Say something.", temperature=0.0, max_tokens=8, ignore_eos=True)
    assert done.stdout.count(f"ids {answer.token_ids}") == 1
    assert done.stdout.count("every rank runs this") == 2
    assert done.stdout.count("rank 0 alone") == 1


@pytest.fixture
def launched() -> Iterator[list[subprocess.Popen[str]]]:
    """Two ranks in the middle of an answer, started as torchrun starts them, without its agent that would end both."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with ExitStack() as stack:
        ranks = []
        for rank in range(2):
            variables = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            process = subprocess.Popen(
                [sys.executable, "-c", ENDLESS],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**_environment(), **variables},
            )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            ranks.append(process)
        assert ranks[0].stdout is not None
        assert ranks[0].stdout.readline() == "begun\n"
        yield ranks


def test_a_launched_worker_that_is_killed_ends_the_driver_with_its_name(
    launched: list[subprocess.Popen[str]],
) -> None:
    driver, worker = launched
    worker.kill()
    _, errors = driver.communicate(timeout=TIMEOUT)
    assert driver.returncode == 1
    (last,) = [line for line in errors.splitlines() if line.startswith("mmserve.errors.EngineDeadError")]
    assert re.search(rf"the worker of rank 1 \(process {worker.pid} on .*\) is gone: its connection broke", last)


def test_a_launched_worker_ends_when_the_driver_is_killed(launched: list[subprocess.Popen[str]]) -> None:
    driver, worker = launched
    driver.kill()
    assert worker.wait(timeout=TIMEOUT) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="children are read from /proc")
def test_ctrl_c_ends_every_process() -> None:
    """SIGINT to the process group, as a terminal sends it: a KeyboardInterrupt, and no worker stays."""
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(),
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="ascii").split()
        assert len(workers) == 1
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in errors
    assert _are_gone(workers)


def _are_gone(process_ids: list[str]) -> bool:
    limit = time.monotonic() + 30
    while any(Path(f"/proc/{process_id}").exists() for process_id in process_ids):
        if time.monotonic() > limit:
            return False
        time.sleep(0.1)
    return True
