"""Numbers of a running engine, as `Engine.stats()` gives them.

state                   "alive"; "closed"; "dead" once a step has failed: then nobody waits, runs or holds blocks
waiting, running        requests without blocks; with blocks (an answer each, if `n` asks for several)
finished, failed        requests that ended with an answer; without one (aborted and too late included)
steps                   steps done
computed_tokens         prompt and generated tokens computed, after a preemption again
generated_tokens        tokens sampled
tokens_per_second       of those, over the time that the last 256 steps took; 0 after 10 seconds without a step
preemptions             times that a request lost its blocks to an older one
blocks, blocks_held, blocks_cached      of the cache: all; in use; free but with content that can be found
prefix_hit_rate         share of prompt tokens that were found in the cache
images_cached, image_bytes              encoded images that are kept, and their rows' bytes
images_encoded          times that the vision tower ran for an image
image_hit_rate          share of uses of an image for which it did not have to run
"""

from __future__ import annotations

from collections import deque
from typing import Any

from mmserve.engine.batch import ScheduledBatch, StepOutput
from mmserve.engine.scheduler import Scheduler

__all__ = ["StatsRecorder"]

_WINDOW = 256
"""Steps over which rates are taken."""

_IDLE_SECONDS = 10.0
"""Seconds after a step for which its rate is still a rate of now."""


class StatsRecorder:
    """Counts what steps do; read from other threads, each number whole by itself."""

    def __init__(self) -> None:
        self.finished = 0
        self.failed = 0
        self._steps = 0
        self._computed = 0
        self._generated = 0
        self._window: deque[tuple[float, int]] = deque(maxlen=_WINDOW)  # seconds and tokens of a step
        self._last_end = 0.0

    def record(self, batch: ScheduledBatch, output: StepOutput, began: float, ended: float) -> None:
        """Count one step that lasted from `began` to `ended`, on the clock of `time.monotonic()`."""
        self._steps += 1
        self._computed += sum(chunk.num_tokens for chunk in batch.chunks)
        self._generated += len(output.sampled)
        self._window.append((ended - began, len(output.sampled)))
        self._last_end = ended

    def snapshot(self, scheduler: Scheduler, inbox: int, now: float, state: str = "alive") -> dict[str, Any]:
        """All numbers at `now`, as the module's head describes them; rates are 0 before anything was counted."""
        pool, ledger = scheduler.blocks.pool, scheduler.images.ledger
        dead = state == "dead"  # its books stay as the failing step left them, and mean nothing
        return {
            "state": state,
            "waiting": 0 if dead else scheduler.num_waiting + inbox,
            "running": 0 if dead else scheduler.num_running,
            "finished": self.finished,
            "failed": self.failed,
            "steps": self._steps,
            "computed_tokens": self._computed,
            "generated_tokens": self._generated,
            "tokens_per_second": self._rate(now) if state == "alive" else 0.0,
            "preemptions": scheduler.num_preemptions,
            "blocks": pool.num_blocks,
            "blocks_held": 0 if dead else pool.num_held,
            "blocks_cached": 0 if dead else pool.num_cached,
            "prefix_hit_rate": _share(scheduler.num_prefix_hit, scheduler.num_prefix_queried),
            "images_cached": len(ledger),
            "image_bytes": ledger.total_bytes,
            "images_encoded": scheduler.images.num_encodes,
            "image_hit_rate": 1.0 - _share(scheduler.images.num_encodes, scheduler.images.num_uses, empty=1),
        }

    def _rate(self, now: float) -> float:
        window = list(self._window)
        seconds = sum(lasted for lasted, _ in window)
        if now - self._last_end > _IDLE_SECONDS or seconds <= 0.0:
            return 0.0
        return sum(count for _, count in window) / seconds


def _share(part: int, whole: int, empty: float = 0.0) -> float:
    return part / whole if whole else empty
