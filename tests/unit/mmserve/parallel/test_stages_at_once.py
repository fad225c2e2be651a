"""Pipeline stages work at once: stage 0 on one batch while stage 1 works on the one before."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from mmserve.config import EngineConfig
from mmserve.engine.core import Engine
from mmserve.engine.runner import ModelRunner
from mmserve.engine.scheduler import SchedulerLimits
from mmserve.errors import RequestAborted
from mmserve.model.interface import CacheSpec, PackedBatch
from mmserve.parallel.layout import Layout
from mmserve.parallel.workers.crew import Crew, Member
from mmserve.parallel.workers.driver import ParallelRunner
from mmserve.parallel.workers.worker import _run_steps
from mmserve.testing import ByteTokenizer, MockModel, mock_prompt
from mmserve.types import SamplingParams

STAGES = Layout(1, 2)
WAIT = 60.0
ANSWER = SamplingParams(max_tokens=12)
FIRST = 4
"""Of the second stage's forwards: by then the requests have been told apart, each in every other step."""
MEETINGS = 5


class ThreadTeam:
    """A second stage that is a thread of this process; its model is a mock, which needs no rows."""

    samples_here = False
    sharers = 2

    def __init__(self, model: MockModel) -> None:
        self._model = model
        self._ours, self._theirs = (Connection(end.detach()) for end in socket.socketpair())
        self.thread = threading.Thread(target=lambda: None)

    def largest_cache(self, own: CacheSpec) -> CacheSpec:
        return own

    def describe(self) -> list[dict[str, object]]:
        return []

    def run_with(self, runner: ModelRunner, limits: SchedulerLimits, unsampled: Sequence[int]) -> ParallelRunner:
        later = ModelRunner.for_limits(
            self._model,
            limits,
            unsampled=unsampled,
            encodes=False,
        )
        self.thread = threading.Thread(target=self._serve, args=(later,), daemon=True)
        self.thread.start()
        return ParallelRunner(runner, Crew([Member(1, self._ours, None)]), STAGES, WAIT)

    def _serve(self, runner: ModelRunner) -> None:
        with suppress(OSError, EOFError):  # the engine may be closed before a step that nobody waits for is answered
            _run_steps(self._theirs, runner, STAGES.place(1))


class Meeting(MockModel):
    """Forwards number first, first + 1, ... end only when the other stage is in its own of that turn."""

    def __init__(self, barrier: threading.Barrier, first: int, may_begin: threading.Event) -> None:
        super().__init__()
        self._barrier = barrier
        self._meets = range(first, first + MEETINGS)
        self._may_begin = may_begin
        self.met: list[int] = []

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        assert self._may_begin.wait(WAIT)
        logits = super().forward(batch)
        if self.num_forwards in self._meets:
            self._barrier.wait(WAIT)
            self.met.append(self.num_forwards)
        return logits


def engine(model: MockModel, team: Any = None, **options: Any) -> Engine:
    config = EngineConfig(block_size=4, num_blocks=32, pipeline_parallel=2 if team else 1, **options)
    return Engine(model, ByteTokenizer(), config, identity="mock", team=team)


def test_stage_0_is_in_the_next_batch_while_stage_1_is_in_this_one() -> None:
    """By rendezvous: neither forward ends before both are running, so without overlap nobody would come."""
    prompts = [mock_prompt([65] * 5), mock_prompt([66] * 7)]
    alone = engine(MockModel())
    expected = [alone.submit(prompt, ANSWER).result(WAIT).token_ids for prompt in prompts]
    alone.close()
    barrier, submitted = threading.Barrier(2), threading.Event()
    first, second = Meeting(barrier, FIRST + 1, submitted), Meeting(barrier, FIRST, submitted)
    together = engine(first, ThreadTeam(second))
    try:
        handles = [together.submit(prompt, ANSWER) for prompt in prompts]
        submitted.set()
        assert [handle.result(WAIT).token_ids for handle in handles] == expected
    finally:
        together.close()
    assert second.met == [4, 5, 6, 7, 8]
    assert first.met == [5, 6, 7, 8, 9]


class Gate(MockModel):
    """Its forward number `stops_at` waits to be let through."""

    def __init__(self, stops_at: int) -> None:
        super().__init__()
        self._stops_at = stops_at
        self.reached, self.open = threading.Event(), threading.Event()

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        logits = super().forward(batch)
        if self.num_forwards == self._stops_at:
            self.reached.set()
            assert self.open.wait(WAIT)
        return logits


@pytest.mark.parametrize("stops_at", [1, 4])
@pytest.mark.parametrize("n", [1, 2])
def test_a_request_given_up_while_its_token_is_on_the_way(stops_at: int, n: int) -> None:
    """Its id is used again before the second stage has answered; the token that is on the way is nobody's."""
    alone = engine(MockModel())
    prompts = [mock_prompt([65] * 5), mock_prompt([66] * 7), mock_prompt([67] * 3)]
    expected = [alone.submit(prompt, ANSWER).result(WAIT).token_ids for prompt in prompts]
    alone.close()
    second = Gate(stops_at)
    together = engine(MockModel(), ThreadTeam(second), max_num_seqs=3)
    try:
        several = SamplingParams(max_tokens=12, n=n)
        given_up = together.submit(prompts[0], several, request_id="same")
        kept = together.submit(prompts[1], ANSWER)
        assert second.reached.wait(WAIT)
        given_up.abort()
        again = together.submit(prompts[2], ANSWER, request_id="same") if given_up.done else None
        second.open.set()
        with pytest.raises(RequestAborted):
            given_up.result(WAIT)
        again = again or together.submit(prompts[2], ANSWER, request_id="same")
        assert again.result(WAIT).token_ids == expected[2]
        assert kept.result(WAIT).token_ids == expected[1]
        assert [together.submit(prompt, ANSWER).result(WAIT).token_ids for prompt in prompts] == expected
        together.check_integrity()
    finally:
        second.open.set()
        together.close()
