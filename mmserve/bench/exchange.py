"""Host time of a step that goes to another rank: the batch and last step's tokens out, tokens back.

A real engine decodes with a model that computes nothing. Before each step the driver sends what a worker would be
sent, through the same code; at the other end a process reads it, takes the tokens in, and answers as the rank does that
chooses tokens. The clock runs from the driver's first act to the answer in its hands: more than tensor parallel needs,
which waits for no answer.

    python -m mmserve.bench.exchange FD      the other end, started by `run`
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from mmserve.bench.scheduler import ClockModel
from mmserve.config import EngineConfig
from mmserve.engine.batch import SampledToken, ScheduledBatch, StepOutput
from mmserve.engine.core import Engine
from mmserve.engine.runner import ModelRunner
from mmserve.engine.scheduler import SchedulerLimits
from mmserve.engine.steps import StepRunner
from mmserve.engine.trial import RankTrial, Trial
from mmserve.model.interface import CacheSpec
from mmserve.parallel.workers.crew import Crew, start_local
from mmserve.parallel.workers.wire import Result, Start, Step, encode, receive, send
from mmserve.testing import ByteTokenizer, mock_prompt
from mmserve.types import SamplingParams

__all__ = ["run"]

_BLOCK_SIZE = 64
_PROMPT = 16
_TIMEOUT = 60.0
_TOKEN = 65
"""What the model always answers."""


def run(num_seqs: int = 32, num_steps: int = 200) -> dict[str, Any]:
    """Measure on this host.

    Args:
        num_seqs: Sequences decoding at once. num_steps: Steps measured.

    Returns:
        {"num_seqs", "steps", "message_bytes" (mean, of a step), and in milliseconds of a step "median_ms", "p90_ms",
        "send_ms" (median: until the batch is out) and "driver_cpu_ms" (median: processor time of the driver, which a
        busy machine does not change)}
    """
    team = _EchoTeam(num_seqs, num_steps)
    answer = num_steps + _PROMPT
    config = EngineConfig(
        block_size=_BLOCK_SIZE,
        num_blocks=num_seqs * (-(-(_PROMPT + answer) // _BLOCK_SIZE) + 1),
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(2048, num_seqs * _PROMPT),
        enable_prefix_caching=False,
    )
    try:
        engine = Engine(ClockModel(), ByteTokenizer(), config, identity="bench", team=team)
    except BaseException:
        team.crew.kill()
        raise
    try:
        handles = [
            engine.submit(mock_prompt([_TOKEN] * _PROMPT), SamplingParams(max_tokens=answer)) for _ in range(num_seqs)
        ]
        for handle in handles:
            handle.result()
    finally:
        engine.close()
    return {"num_seqs": num_seqs, **team.clock.describe()}


class _Clock:
    """Seconds of the steps in which all sequences decode."""

    def __init__(self, num_seqs: int, num_steps: int) -> None:
        self._num_seqs = num_seqs
        self._num_steps = num_steps
        self._sends: list[float] = []
        self._wholes: list[float] = []
        self._cpu: list[float] = []
        self._sizes: list[int] = []

    def note(self, step: Step, sent: float, whole: float, cpu: float) -> None:
        """A step is done; kept if all sequences were in it, each with a token, and enough are not kept yet."""
        chunks = step.batch.chunks
        if len(chunks) == self._num_seqs and all(chunk.num_tokens == 1 for chunk in chunks) and self._has_room():
            self._sends.append(sent)
            self._wholes.append(whole)
            self._cpu.append(cpu)
            self._sizes.append(len(encode(step)))

    def _has_room(self) -> bool:
        return len(self._wholes) < self._num_steps

    def describe(self) -> dict[str, Any]:
        """What came of it."""
        ordered = sorted(self._wholes)
        return {
            "steps": len(ordered),
            "message_bytes": round(statistics.mean(self._sizes)),
            "send_ms": round(statistics.median(self._sends) * 1e3, 3),
            "driver_cpu_ms": round(statistics.median(self._cpu) * 1e3, 3),
            "median_ms": round(statistics.median(ordered) * 1e3, 3),
            "p90_ms": round(ordered[int(0.9 * len(ordered))] * 1e3, 3),
        }


class _EchoTeam:
    """One other process that answers every step; fills `mmserve.engine.steps.Team`."""

    samples_here = True
    sharers = 1

    def __init__(self, num_seqs: int, num_steps: int) -> None:
        self.clock = _Clock(num_seqs, num_steps)
        self.crew = Crew(start_local(1, "mmserve.bench.exchange"))

    def largest_cache(self, own: CacheSpec) -> CacheSpec:
        """Both sides have the same."""
        return own

    def try_step(self, trial: Trial, own: Callable[[], RankTrial]) -> list[RankTrial]:
        """The engine has no budget to keep."""
        raise NotImplementedError

    def run_with(self, runner: ModelRunner, limits: SchedulerLimits, unsampled: Sequence[int]) -> StepRunner:
        """The driver's steps, each sent first."""
        self.crew.tell([1], Start(limits, tuple(unsampled)))
        return _TimedSteps(runner, self.crew, self.clock)

    def describe(self) -> list[dict[str, object]]:
        """Nothing to say."""
        return []


class _TimedSteps:
    """The driver's runner, with an exchange before each step."""

    depth = 1

    def __init__(self, runner: ModelRunner, crew: Crew, clock: _Clock) -> None:
        self._runner = runner
        self._crew = crew
        self._clock = clock
        self._outputs: deque[StepOutput] = deque()
        self._news: tuple[Mapping[str, int], ...] = ()

    def begin(self, batch: ScheduledBatch) -> None:
        """Exchange, then the step here."""
        step = Step(batch, self._news)
        began, worked = time.perf_counter(), time.thread_time()
        self._crew.tell([1], step)
        sent = time.perf_counter()
        self._crew.hear(1, _TIMEOUT)
        whole = time.perf_counter()
        self._clock.note(step, sent - began, whole - began, time.thread_time() - worked)
        output = self._runner.run(batch)
        self._news = ({request_id: token.token_id for request_id, token in output.sampled.items()},)
        self._outputs.append(output)

    def end(self) -> StepOutput:
        """What came of the oldest step."""
        return self._outputs.popleft()

    def close(self) -> None:
        """End both."""
        self._runner.close()
        self._crew.close()


def _answer(connection: Connection) -> None:
    """Be the other rank until the driver is done."""
    start = receive(connection)
    runner = ModelRunner.for_limits(ClockModel(), start.limits, unsampled=start.unsampled, samples=False)
    while isinstance(step := receive(connection), Step):
        for sampled in step.learned:
            runner.learn(sampled)
        tokens = {chunk.request_id: SampledToken(_TOKEN) for chunk in step.batch.chunks if chunk.samples}
        send(connection, Result(StepOutput(tokens)))
        runner.run(step.batch)


def _main() -> int:
    import torch

    torch.set_num_threads(1)
    try:
        _answer(Connection(int(sys.argv[1])))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 1  # the driver is gone
    return 0


if __name__ == "__main__":
    sys.exit(_main())
