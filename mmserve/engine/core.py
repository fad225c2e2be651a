"""The engine: a thread that steps while there is work, and the thread-safe face in front of it.

The life of a request here::

    submit      caller's thread   options resolved, positions planned, refused if it can never fit
    inbox       under a lock      the engine's thread takes it at its next step
    schedule    engine thread     blocks, chunks, images                    Scheduler
    run         engine thread     images, forward, tokens                   ModelRunner
    update      engine thread     computed counts, text, stop, deltas       Scheduler, Answer, RequestHandle

A request that fails is told so and is gone; the others go on. A step that raises ends the engine: everyone who
waits, and every later call, hears why.
"""

from __future__ import annotations

import copy
import heapq
import itertools
import secrets
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from mmserve.cache.prefix_index import PrefixIndex
from mmserve.config import EngineConfig
from mmserve.engine.admission import check_sampling, encode_bad_words, plan_request
from mmserve.engine.answer import Answer
from mmserve.engine.batch import NewRequest, ScheduledBatch, StepOutput
from mmserve.engine.defaults import describe_defaults, resolve_sampling
from mmserve.engine.detokenizer import TextDecoder
from mmserve.engine.handle import RequestHandle
from mmserve.engine.request import Request
from mmserve.engine.runner import ModelRunner
from mmserve.engine.scheduler import Scheduler, SchedulerLimits
from mmserve.engine.sizing import resolve_limits
from mmserve.engine.stats import StatsRecorder
from mmserve.errors import (
    DeadlineExceeded,
    EngineDeadError,
    EngineError,
    Overloaded,
    PipelineClosedError,
    RequestAborted,
)
from mmserve.model.interface import Model
from mmserve.types import SamplingParams
from processors.types import ProcessedPrompt

__all__ = ["Engine", "RequestHandle"]


@dataclass(frozen=True, slots=True)
class _Submission:
    """A request on its way to the engine's thread."""

    request: Request
    arrival: NewRequest
    answer: Answer
    handle: RequestHandle
    deadline: float | None


class Engine:
    """Continuous batching over one model.

    Args:
        model: Loaded; the engine allocates and binds its cache.
        tokenizer: Turns ids into text (a transformers tokenizer, or `mmserve.testing.ByteTokenizer`).
        config: Options.
        identity: Names the weights, adapter and dtype: part of every prefix key.
        generation_config: The model's defaults for sampling (a GenerationConfig, a mapping, or None).
        device: Where the model computes.

    Raises:
        ConfigError: The options do not fit this model.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Any,
        config: EngineConfig,
        *,
        identity: str,
        generation_config: Any = None,
        device: Any = "cpu",
    ) -> None:
        self._model = model
        self._config = config
        self._generation_config = generation_config
        # Its own copy: a fast tokenizer must not be read in one thread while another changes its settings.
        self._tokenizer = copy.deepcopy(tokenizer)
        self._tokenizer_lock = threading.Lock()
        self._decoder = TextDecoder(self._tokenizer)
        self.limits: SchedulerLimits = resolve_limits(config, model)
        # A model that keeps state of its own must compute every token itself.
        cached = config.enable_prefix_caching and not model.needs_sequences
        index = PrefixIndex(identity) if cached else None
        self._scheduler = Scheduler(self.limits, index)
        self._runner = ModelRunner(
            model,
            num_blocks=self.limits.num_blocks,
            block_size=self.limits.block_size,
            max_num_seqs=self.limits.max_num_seqs,
            max_model_len=self.limits.max_model_len,
            device=device,
        )
        self._stats = StatsRecorder()
        self._answers: dict[str, Answer] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._arrivals = itertools.count()
        # Shared with callers, under the lock:
        self._lock = threading.Condition()
        self._inbox: deque[_Submission | str] = deque()
        self._handles: dict[str, RequestHandle] = {}
        self._closing = False
        self._death: BaseException | None = None
        self._thread = threading.Thread(target=self._loop, name="mmserve-engine", daemon=True)
        self._thread.start()

    # -- for callers, from any thread -----------------------------------------------------------

    def submit(
        self,
        prompt: ProcessedPrompt,
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        arrival: float | None = None,
        preprocess: float | None = None,
    ) -> RequestHandle:
        """Put a request in line and return at once.

        Args:
            prompt: Expanded ids and images.
            sampling: Options; what is None takes the model's default.
            request_id: Unique among the requests that are not done; None: one is made up.
            priority: Lower runs sooner.
            timeout: Seconds from `arrival` until it is given up with DeadlineExceeded.
            arrival: `time.monotonic()` of the user's call; None: now.
            preprocess: Seconds that went into the prompt; None: all since `arrival`.

        Raises:
            InvalidRequestError: An option does not fit this model.
            CapacityError: It can never fit; says the numbers.
            Overloaded: The queue is full.
            EngineDeadError: A step has failed before; says why.
            PipelineClosedError: After `close`.
        """
        now = time.monotonic()
        arrival = now if arrival is None else arrival
        self._check_alive()
        request_id = secrets.token_hex(8) if request_id is None else request_id
        sampling = self._resolve(prompt, sampling or SamplingParams())
        plan = self._model.plan(prompt)
        with self._tokenizer_lock:
            bad_words = encode_bad_words(self._tokenizer, sampling.bad_words)
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        submission = _Submission(
            request=plan_request(request_id, prompt, plan, priority=priority, arrival=next(self._arrivals)),
            arrival=NewRequest(request_id, prompt, plan, sampling, seed, bad_words),
            answer=Answer(
                request_id,
                sampling,
                self._decoder,
                num_prompt=len(prompt.token_ids),
                num_image=prompt.num_image_tokens,
                arrival=arrival,
                ready=now,
                preprocess=max(0.0, now - arrival) if preprocess is None else preprocess,
            ),
            handle=RequestHandle(request_id, self.abort),
            deadline=None if timeout is None else arrival + timeout,
        )
        self._enqueue(submission)
        return submission.handle

    def abort(self, request_id: str) -> bool:
        """Give a request up; its waiters hear RequestAborted. Returns whether it was there to abort."""
        with self._lock:
            if request_id not in self._handles or self._death is not None:
                return False
            self._inbox.append(request_id)
            self._lock.notify()
            return True

    def stats(self) -> dict[str, Any]:
        """Numbers right now; JSON-friendly. See docs for what each one means."""
        with self._lock:
            inbox = sum(isinstance(item, _Submission) for item in self._inbox)
        return self._stats.snapshot(self._scheduler, inbox)

    def describe(self) -> dict[str, Any]:
        """The limits in force and the sampling defaults; JSON-friendly."""
        return {
            **{name: getattr(self.limits, name) for name in self.limits.__slots__},
            "sampling_defaults": describe_defaults(self._generation_config),
        }

    def close(self) -> None:
        """End the thread after the step it is in. Whoever waits hears PipelineClosedError. Twice is fine."""
        with self._lock:
            self._closing = True
            self._lock.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def check_integrity(self) -> None:
        """All books of an idle engine agree: nothing is held that nobody needs. For tests.

        Raises:
            RuntimeError: With the first contradiction found.
        """
        self._scheduler.check_integrity()

    # -- submitting -----------------------------------------------------------------------------

    def _resolve(self, prompt: ProcessedPrompt, sampling: SamplingParams) -> SamplingParams:
        resolved = resolve_sampling(sampling, self._generation_config)
        num_prompt = len(prompt.token_ids)
        if sampling.max_tokens is None:
            # The default is a wish, not a demand: it gives way to a long prompt.
            room = max(1, sampling.min_tokens, self.limits.max_model_len - num_prompt)
            resolved = resolved.model_copy(update={"max_tokens": min(resolved.max_tokens or room, room)})
        check_sampling(resolved, self._model.vocab_size, self._model.forbidden_token_ids)
        self._scheduler.check_admission(num_prompt, resolved.max_tokens or 1)
        return resolved

    def _enqueue(self, submission: _Submission) -> None:
        with self._lock:
            self._check_alive()
            request_id = submission.request.request_id
            if request_id in self._handles:
                raise Overloaded(f"a request with id {request_id!r} is still running")
            waiting = self._scheduler.num_waiting + len(self._inbox)
            if waiting >= self._config.max_queue:
                raise Overloaded(f"{waiting} requests are waiting and max_queue is {self._config.max_queue}: try later")
            self._handles[request_id] = submission.handle
            self._inbox.append(submission)
            self._lock.notify()

    def _check_alive(self) -> None:
        if self._death is not None:
            raise self._death_notice()
        if self._closing:
            raise PipelineClosedError("this engine was closed")

    def _death_notice(self) -> EngineDeadError:
        notice = EngineDeadError(f"the engine has died: {type(self._death).__name__}: {self._death}")
        notice.__cause__ = self._death
        return notice

    # -- the engine's thread --------------------------------------------------------------------

    def _loop(self) -> None:
        try:
            while self._take_inbox():
                self._expire()
                if self._scheduler.has_work():
                    self._step()
        except BaseException as error:  # noqa: BLE001 - the border of the engine's life: everyone must hear of it
            self._death = error
        self._end()

    def _step(self) -> None:
        batch = self._scheduler.schedule()
        if not (batch.chunks or batch.finished):
            raise RuntimeError("requests are waiting but nothing can be scheduled: the scheduler's books are wrong")
        output = self._runner.run(batch)
        self._scheduler.update(batch, output)
        self._deliver(batch, output)

    def _take_inbox(self) -> bool:
        """Take in what callers have asked for, waiting for it if there is nothing else to do; False to end."""
        with self._lock:
            self._lock.wait_for(lambda: self._inbox or self._closing or self._scheduler.has_work())
            if self._closing:
                return False
            items = list(self._inbox)
            self._inbox.clear()
        for item in items:
            if isinstance(item, str):
                self._fail(item, RequestAborted(f"request {item} was aborted"))
            else:
                self._begin(item)
        return True

    def _begin(self, submission: _Submission) -> None:
        request_id = submission.request.request_id
        self._answers[request_id] = submission.answer
        self._scheduler.add(submission.request, submission.arrival)
        if submission.deadline is not None:
            heapq.heappush(self._deadlines, (submission.deadline, request_id))

    def _expire(self) -> None:
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = heapq.heappop(self._deadlines)
            self._fail(request_id, DeadlineExceeded(f"request {request_id} did not finish in its time"))

    def _deliver(self, batch: ScheduledBatch, output: StepOutput) -> None:
        """Hand a step's tokens and failures to their owners."""
        now = time.monotonic()
        self._stats.record(batch, output, now)
        for new in batch.new:
            answer, request = self._answers[new.request_id], self._scheduler.get(new.request_id)
            answer.first_scheduled = now
            answer.num_cached = request.num_cached if request is not None else 0
        for request_id, seconds in output.encode_seconds.items():
            self._answers[request_id].encode_seconds += seconds
        for request_id, token in output.sampled.items():
            answer, handle = self._answers[request_id], self._handles[request_id]
            delta = answer.take(token, now)
            if delta is not None:
                handle.put(delta)
            if answer.finish_reason is not None:
                self._finish(request_id, answer)
        for request_id, error in output.failed.items():
            self._fail(request_id, error, poisoned=True)

    def _finish(self, request_id: str, answer: Answer) -> None:
        self._scheduler.finish(request_id)
        del self._answers[request_id]
        output = answer.complete()
        self._stats.finished += 1
        with self._lock:
            handle = self._handles.pop(request_id)
        handle.finish(answer.last_delta(output), output)

    def _fail(self, request_id: str, error: Exception, *, poisoned: bool = False) -> None:
        """End a request without an answer; one that is over already is left alone."""
        if self._answers.pop(request_id, None) is None:
            return
        self._scheduler.finish(request_id, poisoned=poisoned)
        self._stats.failed += 1
        with self._lock:
            handle = self._handles.pop(request_id)
        handle.fail(error)

    def _end(self) -> None:
        """The thread's last act: nobody is left waiting."""
        with self._lock:
            self._closing = True
            handles = list(self._handles.values())
            self._handles.clear()
            self._inbox.clear()
        for handle in handles:
            error: EngineError = PipelineClosedError("the engine was closed before the answer was there")
            handle.fail(self._death_notice() if self._death is not None else error)
