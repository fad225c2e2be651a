"""The driver's side of a parallel engine: its own rank's steps, and the workers' alongside.

A step with two stages of two ranks; the driver is rank 0, tokens are chosen on rank 2::

    rank 0   Step to 1 ── encode ── Step to 2, 3 ── layers 0..k ── ...  (the next batch)  ... Result from 2
    rank 1               encode ──────────────────── layers 0..k
    rank 2                                              └ rows ── layers k.. ── tokens ── Result
    rank 3                                              └ rows ── layers k..
"""

from __future__ import annotations

import socket
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mmserve.engine.batch import NewRequest, ScheduledBatch, StepOutput
from mmserve.engine.runner import ModelRunner
from mmserve.engine.scheduler import SchedulerLimits
from mmserve.engine.sizing import cache_bytes
from mmserve.engine.trial import RankTrial
from mmserve.errors import ConfigError, RequestError, UnsupportedModelError, WorkerError
from mmserve.model.fingerprint import fingerprint
from mmserve.model.interface import CacheSpec
from mmserve.parallel.layout import Layout
from mmserve.parallel.rank import RankShape
from mmserve.parallel.workers.crew import Crew, Member, start_local
from mmserve.parallel.workers.launch import Launch, gather
from mmserve.parallel.workers.meet import host_store, meet
from mmserve.parallel.workers.wire import Ready, Result, Setup, Start, Step, Trial, Tried

__all__ = ["ParallelRunner", "Team", "start_team"]

_HOST = "127.0.0.1"


class Team:
    """The ranks of one engine, up and connected; the driver among them.

    Args:
        layout: Of the ranks.
        crew: The workers.
        rank: What the driver itself has.
        store: Where they met; kept alive as long as they are.
        timeout: Seconds of silence after which a rank counts as lost.
        sharers: Ranks that share the memory of one host or device, at most.
    """

    def __init__(self, layout: Layout, crew: Crew, rank: RankShape, store: Any, timeout: float, sharers: int) -> None:
        self.layout = layout
        self.rank = rank
        self._crew = crew
        self._store = store
        self._timeout = timeout
        self.sharers = sharers
        self._ranks: list[Ready] = []
        self._limits: SchedulerLimits | None = None

    @property
    def samples_here(self) -> bool:
        """Whether tokens are chosen in this process."""
        return self.rank.place.samples

    def largest_cache(self, own: CacheSpec) -> CacheSpec:
        """Wait until every worker has loaded its part; the cache of the rank where a block takes most bytes.

        Raises:
            UnsupportedModelError: Ranks would keep their layers in different groups of blocks.
            MMServeError: One could not load its part: its error.
        """
        most, windows = own, own.layout().windows
        for member, ready in _by_rank(self._crew.hear_all(self._timeout)):
            if not isinstance(ready, Ready):
                raise WorkerError(f"{member} sent a {type(ready).__name__} instead of being ready")
            if ready.cache.layout().windows != windows:
                raise UnsupportedModelError(
                    f"the layers' caches are grouped by windows {windows} here and {ready.cache.layout().windows} by "
                    f"{member}, whose heads are others: give another tensor_parallel"
                )
            most = max(most, ready.cache, key=CacheSpec.slot_bytes)
            self._ranks.append(ready)
        return most

    def try_step(self, trial: Trial, own: Callable[[], RankTrial]) -> list[RankTrial]:
        """Run the worst step on all ranks at once; `own`: here. What it took on each, in the order of ranks.

        Raises:
            MMServeError: A rank has failed, or is lost.
        """
        first = range(1, self.layout.tensor)
        self._crew.tell(first, trial)
        self._crew.tell(
            range(self.layout.tensor, self.layout.size), replace(trial, batch=_without_pictures(trial.batch))
        )
        found = [own()]
        for member, tried in _by_rank(self._crew.hear_all(self._timeout)):
            if not isinstance(tried, Tried):
                raise WorkerError(f"{member} sent a {type(tried).__name__} instead of what a trial took")
            cache = self._ranks[member.rank - 1].cache
            found.append(RankTrial(member.rank, cache, member.rank in first, tried))
        return found

    def describe(self) -> list[dict[str, Any]]:
        """What each worker holds; JSON-friendly."""
        kept = ("parallel", "device", "parameters", "weight_bytes", "path", "kernels", "replacements")
        found = [{name: ready.about[name] for name in kept if name in ready.about} for ready in self._ranks]
        if self._limits is not None:
            for entry, ready in zip(found, self._ranks, strict=True):
                entry["cache_bytes"] = cache_bytes(self._limits.num_blocks, ready.cache, self._limits.block_size)
        return found

    def run_with(self, runner: ModelRunner, limits: SchedulerLimits, unsampled: Sequence[int]) -> ParallelRunner:
        """Start the workers' runners; what runs a step on all ranks."""
        self._limits = limits
        self._crew.tell(range(1, self.layout.size), Start(limits, tuple(unsampled)))
        return ParallelRunner(runner, self._crew, self.layout, self._timeout)

    def explain(self, error: BaseException) -> BaseException:
        """The reason of an error that a worker may have caused."""
        try:
            self._crew.explain(error)
        except Exception as reason:  # noqa: BLE001 - the reason is what was asked for
            return reason

    def kill(self) -> None:
        """End all workers now."""
        self._crew.kill()


class ParallelRunner:
    """Runs steps on all ranks; the engine's `StepRunner`.

    Args:
        runner: The driver's own.
        crew: The workers, started.
        layout: Of the ranks.
        timeout: Seconds to wait for tokens.
    """

    def __init__(self, runner: ModelRunner, crew: Crew, layout: Layout, timeout: float) -> None:
        self.depth = layout.pipeline
        self._runner = runner
        self._crew = crew
        self._timeout = timeout
        self._layout = layout
        self._chooser = layout.size - layout.tensor
        self._first = range(1, layout.tensor)
        self._later = range(layout.tensor, layout.size)
        self._own: deque[StepOutput] = deque()
        self._news: list[Mapping[str, int]] = []
        self._begun = 0

    def begin(self, batch: ScheduledBatch) -> None:
        """Start a step; its result is `end`'s, in the order of begins.

        Raises:
            WorkerError: A rank is lost.
        """
        self._begun += 1
        learned, self._news = tuple(self._news), []
        try:
            self._crew.tell(self._first, Step(_without_processors(batch), learned))
            if self._chooser:
                for sampled in learned:
                    self._runner.learn(sampled)
            self._own.append(self._runner.run(batch, announce=lambda failed: self._announce(batch, learned, failed)))
        except RuntimeError as error:  # what a broken exchange raises
            self._crew.explain(error)

    def end(self) -> StepOutput:
        """The oldest step's result.

        Raises:
            WorkerError: A rank is lost.
        """
        own = self._own.popleft()
        output = own if not self._chooser else _joined(own, self._result())
        if self._layout.size > 1:
            self._news.append({request_id: token.token_id for request_id, token in output.sampled.items()})
        return output

    def close(self) -> None:
        """Let go of the model and end all workers."""
        try:
            self._runner.close()
        finally:
            self._crew.close()

    def _announce(
        self, batch: ScheduledBatch, learned: tuple[Mapping[str, int], ...], failed: Mapping[str, RequestError]
    ) -> None:
        if self._later:
            # The rank that chooses tokens knows them already, and is told nothing twice.
            others = [rank for rank in self._later if rank != self._chooser]
            plain = _without_pictures(_without_processors(batch))
            failures = dict(failed)
            self._crew.tell([self._chooser], Step(plain, (), failures))
            self._crew.tell(others, Step(plain, learned, failures))

    def _result(self) -> StepOutput:
        message = self._crew.hear(self._chooser, self._timeout)
        if not isinstance(message, Result):
            raise WorkerError(f"rank {self._chooser} sent a {type(message).__name__} instead of its tokens")
        return message.output


def _by_rank(heard: Sequence[tuple[Member, Any]]) -> list[tuple[Member, Any]]:
    return sorted(heard, key=lambda said: said[0].rank)


def _joined(first: StepOutput, last: StepOutput) -> StepOutput:
    """What the first stage says of images, and the last one of tokens."""
    failed = {**last.failed, **first.failed}
    return replace(last, failed=failed, image_bytes=first.image_bytes, encode_seconds=first.encode_seconds)


def _without_processors(batch: ScheduledBatch) -> ScheduledBatch:
    """Callers' own code runs where tokens are chosen, and is never sent."""
    return _with_new(batch, lambda new: replace(new, processors=()))


def _without_pictures(batch: ScheduledBatch) -> ScheduledBatch:
    """Later stages never see pixels."""

    def plain(new: NewRequest) -> NewRequest:
        images = tuple(replace(image, tensors={}, features=None) for image in new.prompt.images)
        return replace(new, prompt=replace(new.prompt, images=images))

    return _with_new(batch, plain)


def _with_new(batch: ScheduledBatch, change: Any) -> ScheduledBatch:
    return replace(batch, new=tuple(change(new) for new in batch.new)) if batch.new else batch


def start_team(
    folder: str,
    layout: Layout,
    *,
    dtype: str,
    device: torch.device,
    attention_backend: str,
    block_size: int,
    replace: bool = True,
    trust_remote_code: bool,
    allow_pickled_weights: bool = False,
    ignore_weights: Sequence[str] = (),
    plan: Mapping[str, str] | None,
    timeout: float,
    members: Sequence[Member] | None = None,
    launch: Launch | None = None,
    options: Mapping[str, str] | None = None,
) -> Team:
    """Connect to a worker for each further rank: started here, on this machine, unless they are there already.

    Args:
        folder, dtype, device, attention_backend, block_size: As for `load_model`.
        replace, trust_remote_code, allow_pickled_weights, ignore_weights: As for `load_model`.
        layout: Of the ranks.
        plan: The caller's tensor-parallel plan.
        timeout: Seconds of silence after which a rank counts as lost.
        members: Workers that are there already, and wait for another engine after this one.
        launch: Of this process, rank 0, if a launcher started all ranks; they end with the engine.
        options: What the other ranks of a launch must have been told too.

    Raises:
        ConfigError: There are fewer CUDA devices than ranks, this launch has had its engine, or a rank of it was told
            something else.
        WorkerError: A worker did not come up.
    """
    keep, host, files, share = members is not None, _HOST, {}, None
    if launch is not None:
        files = fingerprint(Path(folder), allow_pickled=allow_pickled_weights)
        members, host = gather(launch, timeout, options or {})
        devices = [str(device), *(_own_device(member, device) for member in members)]
    else:
        devices = rank_devices(layout, device)
        share = max(1, torch.get_num_threads() // layout.size)
    crew = Crew(start_local(layout.size - 1) if members is None else members, keep=keep)
    try:
        store = host_store(host, timeout)
        common: dict[str, Any] = {
            "layout": layout, "host": host, "files": files, "port": store.port, "name": "engine",
            "folder": folder, "dtype": dtype,
            "attention_backend": attention_backend, "block_size": block_size, "replace": replace,
            "trust_remote_code": trust_remote_code, "allow_pickled_weights": allow_pickled_weights,
            "ignore_weights": tuple(ignore_weights),
            "plan": plan, "timeout": timeout, "threads": share,
        }  # fmt: skip
        crew.greet((Setup(rank=rank, device=devices[rank], **common) for rank in range(1, layout.size)), timeout)
        place = layout.place(0)
        try:
            groups = crew.while_up(lambda: meet(store, "engine", place, torch.device(devices[0]), host, timeout))
        except RuntimeError as error:
            crew.explain(error)
    except BaseException:
        crew.kill()
        raise
    sharers = 1 if device.type == "cuda" else _most_on_a_host(layout.size, members if launch is not None else None)
    return Team(layout, crew, RankShape(place, groups.tensor, groups.pipeline, plan), store, timeout, sharers)


def _most_on_a_host(size: int, members: Sequence[Member] | None) -> int:
    """Ranks of the fullest host, the driver among them; without `members`, all are on this one."""
    if members is None:
        return size
    return max(Counter([socket.gethostname(), *(member.host for member in members)]).values())


def _own_device(member: Member, device: torch.device) -> str:
    """Of a rank that a launcher started.

    Raises:
        ConfigError: The launcher does not say which device is its.
    """
    if device.type != "cuda":
        return str(device)
    if member.local_rank is None:
        raise ConfigError(f"which CUDA device {member} takes is said by LOCAL_RANK, which is not in its environment")
    return f"cuda:{member.local_rank}"


def rank_devices(layout: Layout, device: torch.device) -> list[str]:
    """Each rank's device: the CPU for all, or the CUDA devices from `device` on.

    Raises:
        ConfigError: There are too few.
    """
    if device.type != "cuda":
        return [str(device)] * layout.size
    first = device.index or 0
    found = torch.cuda.device_count()
    if first + layout.size > found:
        raise ConfigError(
            f"tensor_parallel {layout.tensor} x pipeline_parallel {layout.pipeline} take {layout.size} CUDA devices "
            f"from cuda:{first} on, and there are {found}"
        )
    return [f"cuda:{first + rank}" for rank in range(layout.size)]
