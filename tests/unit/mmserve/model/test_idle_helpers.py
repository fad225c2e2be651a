"""Helpers of OpenMP end where they are not needed: a second team keeps the engine's from waiting awake."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mmserve.model.threads import end_idle_helpers
from mmserve.pipeline import MMPipeline

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a process's threads are read from /proc")


@pytest.fixture(autouse=True)
def two_cores() -> Iterator[None]:
    """Each thread that begins has torch on two cores, so one helper."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # which may start threads of torch's own, that are no helpers of OpenMP
    yield
    torch.set_num_threads(threads)


def helpers() -> int:
    """Threads of this process that Python knows nothing of."""
    return len(os.listdir("/proc/self/task")) - threading.active_count()


def work_on_two_cores() -> None:
    torch.ones(1 << 20).add_(1)


def in_a_thread(check: Callable[[], None]) -> None:
    """In a thread of its own, which has no helpers yet."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(check).result()


def test_a_threads_helpers_end_and_come_back() -> None:
    def check() -> None:
        before = helpers()
        work_on_two_cores()
        assert helpers() == before + 1
        end_idle_helpers()
        assert helpers() == before
        end_idle_helpers()
        work_on_two_cores()
        assert helpers() == before + 1
        end_idle_helpers()

    in_a_thread(check)


def test_a_pipeline_leaves_helpers_with_its_engine_alone() -> None:
    picture = torch.zeros(3, 300, 300, dtype=torch.uint8)

    def check() -> None:
        before = helpers()
        with MMPipeline(dtype="float32", num_blocks=64) as pipe:
            assert helpers() <= before + 1  # none of the thread that loaded the model
            pipe.generate(picture, "What?", max_tokens=2)
            assert helpers() <= before + 1  # none of the thread that read the picture
        end_idle_helpers()

    work_on_two_cores()
    MMPipeline(dtype="float32", num_blocks=64).close()  # threads that torch starts once a process are there
    in_a_thread(check)
