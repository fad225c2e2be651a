"""The seam between the engine's loop and whatever runs its steps: this process alone, or several."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from mmserve.engine.batch import ScheduledBatch, StepOutput
from mmserve.engine.runner import ModelRunner
from mmserve.engine.scheduler import SchedulerLimits
from mmserve.engine.trial import RankTrial, Trial
from mmserve.model.interface import CacheSpec

__all__ = ["LocalSteps", "StepRunner", "Team"]


class StepRunner(Protocol):
    """Runs steps, in the order in which they begin."""

    @property
    def depth(self) -> int:
        """Steps that may have begun and not ended: more than one where stages work at once."""
        ...

    def begin(self, batch: ScheduledBatch) -> None:
        """Start a step. What is raised ends the engine."""
        ...

    def end(self) -> StepOutput:
        """Wait for the oldest step that has begun. What is raised ends the engine."""
        ...

    def close(self) -> None:
        """Let go of everything; twice is fine."""
        ...


class Team(Protocol):
    """Other processes that run the same steps."""

    @property
    def samples_here(self) -> bool:
        """Whether tokens are chosen in this process."""
        ...

    @property
    def sharers(self) -> int:
        """Ranks that share the memory of one host or device, at most."""
        ...

    def largest_cache(self, own: CacheSpec) -> CacheSpec:
        """The cache of the rank where a block takes most bytes; `own`: this one's. Waits until all have loaded."""
        ...

    def try_step(self, trial: Trial, own: Callable[[], RankTrial]) -> list[RankTrial]:
        """Run the worst step on all ranks at once; `own`: here. What it took on each, in the order of ranks."""
        ...

    def run_with(self, runner: ModelRunner, limits: SchedulerLimits, unsampled: Sequence[int]) -> StepRunner:
        """All ranks as one; `runner`: this one's. unsampled: Ids that are never sampled."""
        ...

    def describe(self) -> list[dict[str, object]]:
        """What each of the others holds; JSON-friendly."""
        ...


class LocalSteps:
    """Steps of this process alone, one at a time."""

    depth = 1

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._outputs: deque[StepOutput] = deque()

    def begin(self, batch: ScheduledBatch) -> None:
        """Do the step."""
        self._outputs.append(self._runner.run(batch))

    def end(self) -> StepOutput:
        """What came of it."""
        return self._outputs.popleft()

    def close(self) -> None:
        """Let the model let go of all requests."""
        self._runner.close()
