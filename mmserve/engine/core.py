"""The engine's face: checks a request, plans it, and hands it to the loop; from any thread.

The life of a request here::

    submit      caller's thread     options resolved, positions planned, refused if it can never fit
    inbox ..    engine's thread     steps until its last token, see `mmserve.engine.loop`
    handle      caller's thread     deltas, the answer, or why there is none
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mmserve.cache.prefix_index import PrefixIndex
from mmserve.config import EngineConfig
from mmserve.engine.admission import check_sampling, encode_bad_words, plan_request
from mmserve.engine.answer import Answer, AnswerTimes
from mmserve.engine.batch import Fork, LogitsProcessor, NewRequest
from mmserve.engine.defaults import describe_defaults, resolve_sampling, unsampled_ids
from mmserve.engine.detokenizer import TextDecoder
from mmserve.engine.handle import RequestHandle, check_caller, check_request_id
from mmserve.engine.loop import EngineLoop, Submission
from mmserve.engine.memory import plan_memory
from mmserve.engine.random import derive_seed
from mmserve.engine.request import Request
from mmserve.engine.runner import ModelRunner
from mmserve.engine.scheduler import Scheduler, SchedulerLimits
from mmserve.engine.sizing import resolve_limits
from mmserve.engine.steps import LocalSteps, StepRunner, Team
from mmserve.engine.ticket import Ticket
from mmserve.errors import InvalidRequestError, PipelineClosedError
from mmserve.model.interface import Model
from mmserve.model.threads import end_idle_helpers
from mmserve.types import SamplingParams
from processors.types import ProcessedPrompt

__all__ = ["Engine", "RequestHandle"]


class Engine:
    """Continuous batching over one model.

    Args:
        model: Loaded; the engine allocates and binds its cache.
        tokenizer: Turns ids into text (a transformers tokenizer, or `mmserve.testing.ByteTokenizer`).
        config: Options.
        identity: Names the weights, adapter and dtype: part of every prefix key.
        generation_config: The model's defaults for sampling (a GenerationConfig, a mapping, or None).
        device: Where the model computes.
        worst_prompt: Makes the prompt of the worst step, of so many tokens, if `memory_budget` asks for a trial of it.
        team: The other processes of a parallel engine, whose first rank `model` is; None: there are none.

    Raises:
        ConfigError: The options do not fit this model, or not the memory, or not several processes.
        MMServeError: A worker of the team could not load its part.
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
        worst_prompt: Callable[[int], ProcessedPrompt] | None = None,
        team: Team | None = None,
    ) -> None:
        self._model: Model | None = model
        self._team = team
        self._config = config
        self._generation_config = generation_config
        # Copies of its own: a fast tokenizer must not be read in one thread while another changes its settings, as
        # encoding does. One encodes bad words in callers' threads, under the lock; one decodes in the engine's.
        self._encoder = copy.deepcopy(tokenizer)
        self._encoder_lock = threading.Lock()
        self._decoder = TextDecoder(copy.deepcopy(tokenizer))
        cache = model.cache_spec() if team is None else team.largest_cache(model.cache_spec())
        sharers = 1 if team is None else team.sharers
        self._memory = plan_memory(config, model, torch.device(device), worst_prompt, sharers, team)
        self.limits: SchedulerLimits = resolve_limits(config, cache, model.max_position, self._memory.kv_cache)
        self._unsampled = unsampled_ids(model.forbidden_token_ids, tokenizer, model.vocab_size, generation_config)
        # A model that keeps state of its own must compute every token itself.
        self._prefix_caching = config.enable_prefix_caching and not model.needs_sequences
        groups = self.limits.groups
        rooted = groups[0].window is None
        index = PrefixIndex(identity, num_groups=len(groups), rooted=rooted) if self._prefix_caching else None
        self._scheduler = Scheduler(self.limits, index)
        self._runner = ModelRunner.for_limits(
            model,
            self.limits,
            unsampled=self._unsampled,
            device=device,
            samples=team is None or team.samples_here,
        )
        self._arrivals = itertools.count()
        steps: StepRunner = (
            LocalSteps(self._runner) if team is None else team.run_with(self._runner, self.limits, self._unsampled)
        )
        end_idle_helpers()  # this thread's, which loaded the model: steps run in another
        self._loop = EngineLoop(self._scheduler, steps, config.max_queue)
        # The loop knows nothing of this object: dropping it, or leaving the program, ends the thread too.
        self._finalizer = weakref.finalize(self, self._loop.close)

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
        logits_processors: Sequence[LogitsProcessor] = (),
    ) -> RequestHandle:
        """Put a request in line and return at once.

        Args:
            prompt: Expanded ids and images.
            sampling: Options; what is None takes the model's default.
            request_id: Unique among the requests that are not done, without "#"; None: one is made up.
            priority: Lower runs sooner.
            timeout: Seconds from `arrival` until it is given up with DeadlineExceeded, at once if there are none left.
            arrival: `time.monotonic()` of the user's call; None: now.
            preprocess: Seconds that went into the prompt, without those of waiting for a worker to make it (these
                count as waiting in the queue); None: all since `arrival`.
            logits_processors: The caller's own, called in turn with ids int64 [1, L] and scores float32 [1, V] before
                temperature and what follows it, in the engine's thread; as transformers' LogitsProcessor. One that
                raises fails its request; while one runs no step does, so one that waits for an answer of this engine
                is refused that (InvalidRequestError), and a slow one delays all.

        Raises:
            InvalidRequestError: An option does not fit this model.
            CapacityError: It can never fit; says the numbers.
            Overloaded: The queue is full.
            EngineDeadError: A step has failed before; says why.
            PipelineClosedError: After `close`.
        """
        now = time.monotonic()
        arrival = now if arrival is None else arrival
        self._loop.check_alive()
        request_id = secrets.token_hex(8) if request_id is None else request_id
        if logits_processors and self._team is not None and not self._team.samples_here:
            raise InvalidRequestError(
                "logits_processors run where tokens are chosen, which under pipeline_parallel is another process: "
                "use tensor_parallel alone with them"
            )
        if "#" in request_id:
            raise InvalidRequestError(f"a request id has no '#' (it marks further answers), unlike {request_id!r}")
        sampling = self._resolve(prompt, sampling or SamplingParams())
        if timeout is not None and math.isnan(timeout):
            raise InvalidRequestError("timeout is a number of seconds or None, not nan, which no clock ever reaches")
        requests = self._plan(request_id, prompt, sampling, priority, tuple(logits_processors))
        times = AnswerTimes(arrival, max(0.0, now - arrival) if preprocess is None else preprocess)
        answers = {
            answer_id: Answer(request_id, prompt, sampling, self._decoder, times)
            for _, new in requests
            for answer_id in (new.request_id, *(fork.request_id for fork in new.forks))
        }
        # Through the handle a request keeps its engine alive, even if its owner has dropped it.
        deadline = None if timeout is None else arrival + timeout
        handle = RequestHandle(request_id, self._abort, deadline=deadline, engine_thread=self._loop.thread)
        self._loop.submit(Submission(requests, Ticket(handle, answers), deadline))
        return handle

    def check_caller(self) -> None:
        """Whether the calling thread may wait for an answer.

        Raises:
            InvalidRequestError: It is the engine's own, in which logits processors are called.
        """
        check_caller(self._loop.thread)

    def abort(self, request_id: str) -> bool:
        """Give a request up; its waiters hear RequestAborted. Returns whether it was there to abort.

        Raises:
            InvalidRequestError: `request_id` is no string.
        """
        check_request_id(request_id)
        return self._loop.abort(request_id)

    def stats(self) -> dict[str, Any]:
        """Numbers right now, JSON-friendly; `mmserve.engine.stats` says what each one means."""
        return self._loop.stats()

    def describe(self) -> dict[str, Any]:
        """The limits in force and the sampling defaults; JSON-friendly."""
        return {
            **dataclasses.asdict(self.limits),
            "prefix_caching": self._prefix_caching,
            "memory": dataclasses.asdict(self._memory),
            "sampling_defaults": describe_defaults(self._generation_config),
            "workers": [] if self._team is None else self._team.describe(),
        }

    def close(self) -> None:
        """End the thread after the step it is in, and let go of cache and model, even if this object is still known.

        Whoever waits hears PipelineClosedError. Twice is fine.
        """
        self._finalizer.detach()
        self._loop.close()
        self._model = None

    def check_integrity(self) -> None:
        """All books of an idle engine agree: nothing is held that nobody needs. For tests.

        Raises:
            RuntimeError: With the first contradiction found.
        """
        self._scheduler.check_integrity()

    # -- submitting -----------------------------------------------------------------------------

    def _loaded(self) -> Model:
        model = self._model
        if model is None:
            raise PipelineClosedError("this engine was closed")
        return model

    def _resolve(self, prompt: ProcessedPrompt, sampling: SamplingParams) -> SamplingParams:
        model = self._loaded()
        if sampling.prompt_logprobs is not None and model.needs_sequences:
            raise InvalidRequestError("prompt_logprobs are not there on the generate() path, which this model runs on")
        vocab_size = model.vocab_size
        check_sampling(sampling, vocab_size, self._unsampled)
        resolved = resolve_sampling(sampling, self._generation_config)
        # The caller's were checked; those of the model's config that its head can not say never come.
        ends = tuple(token_id for token_id in resolved.stop_token_ids if 0 <= token_id < vocab_size)
        resolved = resolved.model_copy(update={"stop_token_ids": ends})
        num_prompt = len(prompt.token_ids)
        if sampling.max_tokens is None:
            # The default is a wish, not a demand: it gives way to a long prompt.
            room = max(1, sampling.min_tokens, self.limits.max_model_len - num_prompt)
            resolved = resolved.model_copy(update={"max_tokens": min(resolved.max_tokens or room, room)})
        at_once = 1 if model.needs_sequences else resolved.n
        self._scheduler.check_admission(num_prompt, resolved.max_tokens or 1, at_once)
        return resolved

    def _abort(self, handle: RequestHandle) -> None:
        self._loop.abort(handle.request_id, handle)

    def _plan(
        self,
        request_id: str,
        prompt: ProcessedPrompt,
        sampling: SamplingParams,
        priority: int,
        processors: tuple[LogitsProcessor, ...],
    ) -> tuple[tuple[Request, NewRequest], ...]:
        """What the scheduler and the runner are to know: one prompt whose answers fork, if the model can.

        A model that keeps state of its own can not share it, so there every answer computes the prompt for itself.
        """
        model = self._loaded()
        plan = model.plan(prompt)
        longest_span = max((stop - start for start, stop in plan.spans), default=0)
        if longest_span > self.limits.max_num_batched_tokens:
            at_least = len(prompt.token_ids), sampling.max_tokens or 1, 1
            self._scheduler.check_admission(*at_least, longest_span)
        bad_words: tuple[tuple[int, ...], ...] = ()
        if sampling.bad_words:
            with self._encoder_lock:
                bad_words = encode_bad_words(self._encoder, sampling.bad_words)
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        answers = [Fork(request_id if i == 0 else f"{request_id}#{i}", derive_seed(seed, i)) for i in range(sampling.n)]
        entries = []
        for first, *others in [[answer] for answer in answers] if model.needs_sequences else [answers]:
            request = plan_request(
                first.request_id,
                prompt,
                plan,
                priority=priority,
                arrival=next(self._arrivals),
                forks=others,
                all_logits=sampling.prompt_logprobs is not None,
            )
            new = NewRequest(first.request_id, prompt, plan, sampling, first.seed, bad_words, processors, tuple(others))
            entries.append((request, new))
        return tuple(entries)
