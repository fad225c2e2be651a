"""`MMPipeline`: the public face. Holds a processor, a model and an engine; subclasses nothing."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from mmserve.assembly import assemble, process_request, resolve_folder
from mmserve.batching import BatchRun, give_up
from mmserve.config import EngineConfig
from mmserve.engine.handle import check_request_id, drop_locals
from mmserve.errors import DeadlineExceeded, InvalidRequestError, MMServeError, PipelineClosedError, RequestAborted
from mmserve.lookahead import Lookahead, Prepared
from mmserve.model.memory import give_back_after
from mmserve.model.threads import end_idle_helpers
from mmserve.requests import (
    Images,
    RequestLike,
    as_request,
    build_request,
    chat_request,
    image_inputs,
)
from mmserve.types import GenerationOutput, GenerationRequest, Message, SamplingParams, StreamDelta

if TYPE_CHECKING:
    import torch

    from mmserve.engine.batch import LogitsProcessor
    from mmserve.engine.core import RequestHandle
    from mmserve.model.interface import Model
    from processors.types import ProcessedPrompt

__all__ = ["MMPipeline"]

_AHEAD = 64 * 2**20
"""Bytes of images that wait for a CPU: one or two large ones, which take it longer than others to prepare."""
_AHEAD_OF_GPU = 2**30

PROGRESS_DELAY = 2.0
"""Seconds of work after which a progress bar appears by itself."""


_CLOSED = "this pipeline was closed: make a new one"


class MMPipeline:
    """A vision-language model, ready to answer, in this process.

        with MMPipeline("path-or-hub-id") as pipe:
            print(pipe.generate("photo.jpg", "What is on the table?").text)

    Safe to use from several threads and event loops at once.

    Args:
        model: A model folder, or a hub id; None: the demo model inside the package.
        dtype: "auto" (the checkpoint's own), or a torch dtype or its name.
        device: "auto" (CUDA if there is one), or a torch device or its name.
        revision: Branch, tag or commit of a hub model.
        trust_remote_code: Run code that comes with the model.
        options: Fields of `EngineConfig`.

    Raises:
        ConfigError: An option is unknown or out of range.
        ModelLoadError: The model can not be found or loaded; nothing was started.
        SystemExit: Under torchrun, on every rank but the first, when rank 0 has closed its pipeline.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        revision: str | None = None,
        trust_remote_code: bool = False,
        **options: Any,
    ) -> None:
        self._config = EngineConfig(**options)
        parts = assemble(
            resolve_folder(model, revision, trust_remote_code=trust_remote_code),
            self._config,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
        )
        self._folder = parts.folder
        self._processor = parts.processor
        self._model: Model | None = parts.model
        self._last_description: dict[str, Any] = {}
        self._engine = parts.engine
        self._workers = ThreadPoolExecutor(self._config.preprocess_threads, thread_name_prefix="mmserve-preprocess")
        ahead = self._config.prepared_memory
        if ahead is None:
            ahead = _AHEAD if parts.model.describe()["device"] == "cpu" else _AHEAD_OF_GPU
        self._lookahead = Lookahead(self._workers, self._config.preprocess_threads, ahead)
        self._preparing: dict[str, bool] = {}  # id of a request with a worker -> whether it was aborted there
        self._preparing_lock = threading.Lock()
        self._closed = False

    # -- asking ---------------------------------------------------------------------------------

    def generate(
        self,
        image: Images | GenerationRequest,
        prompt: str | None = None,
        *,
        sampling: SamplingParams | None = None,
        raw: bool = False,
        processor_options: Mapping[str, Any] | None = None,
        priority: int = 0,
        timeout: float | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
        **sampling_options: Any,
    ) -> GenerationOutput:
        """Answer one question about no, one or several images; or run a whole `GenerationRequest`.

        Args:
            image: None, one image or a list of them; or a request, and then nothing else is given.
            prompt: The question; one user turn through the model's chat template, images first.
            sampling: `SamplingParams` whole; or else its fields one by one, as `sampling_options`.
            raw: Take the prompt verbatim, with the model's own image tokens or `<image>` marks.
            processor_options: Options of the model's own processor for this request.
            priority: Lower runs sooner.
            timeout: Seconds until the request is given up.
            logits_processors: Your own code, called for each token as transformers' LogitsProcessor: (ids int64 [1, L],
                scores float32 [1, V]) -> scores; in the engine's thread, so it should be quick, and asking the same
                pipeline there is refused.
            sampling_options: Fields of `SamplingParams`.

        Raises:
            InvalidRequestError: An option is unknown or out of range.
            InputError: An image can not be read, or prompt and images do not fit together.
            CapacityError: It can never fit this pipeline.
            RequestError: It failed otherwise; the pipeline goes on.
            EngineError: The engine has died, or the pipeline was closed.
        """
        request = build_request(
            image,
            prompt,
            sampling=sampling,
            raw=raw,
            processor_options=processor_options,
            priority=priority,
            timeout=timeout,
            logits_processors=logits_processors,
            **sampling_options,
        )
        return self._run(request)

    def chat(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        sampling: SamplingParams | None = None,
        processor_options: Mapping[str, Any] | None = None,
        priority: int = 0,
        timeout: float | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
        **sampling_options: Any,
    ) -> GenerationOutput:
        """Answer a conversation whose messages have OpenAI-style content parts, pictures where they stand.

        To stream one, or to put it in a batch, make a `GenerationRequest(messages=...)` of it.

        Raises:
            MMServeError: As `generate`; InputError also if the model has no chat template.
        """
        request = chat_request(
            messages,
            sampling=sampling,
            processor_options=processor_options,
            priority=priority,
            timeout=timeout,
            logits_processors=logits_processors,
            **sampling_options,
        )
        return self._run(request)

    def stream(
        self,
        image: Images | GenerationRequest,
        prompt: str | None = None,
        *,
        sampling: SamplingParams | None = None,
        raw: bool = False,
        processor_options: Mapping[str, Any] | None = None,
        priority: int = 0,
        timeout: float | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
        **sampling_options: Any,
    ) -> DeltaStream:
        """As `generate`, yielding text as it comes; the deltas add up to the text, the last one has the output.

        The request starts with this call, not with the first delta. Closing the stream, or letting go of it,
        aborts the request.
        """
        request = build_request(
            image,
            prompt,
            sampling=sampling,
            raw=raw,
            processor_options=processor_options,
            priority=priority,
            timeout=timeout,
            logits_processors=logits_processors,
            **sampling_options,
        )
        return DeltaStream(self._start(request))

    async def agenerate(
        self, image: Images | GenerationRequest, prompt: str | None = None, **options: Any
    ) -> GenerationOutput:
        """As `generate`, with the same options, awaited. Cancelling the task aborts the request."""
        handle = await self._astart(build_request(image, prompt, **options))
        return await handle.aresult()

    async def astream(
        self, image: Images | GenerationRequest, prompt: str | None = None, **options: Any
    ) -> AsyncIterator[StreamDelta]:
        """As `stream`, with the same options, for `async for`. The request starts with the first step of the loop."""
        handle = await self._astart(build_request(image, prompt, **options))
        try:
            async for delta in handle:
                yield delta
        finally:
            handle.abort()

    def generate_batch(
        self,
        requests: Iterable[RequestLike],
        *,
        on_error: Literal["raise", "return"] = "raise",
        progress: bool | None = None,
    ) -> list[GenerationOutput | MMServeError]:
        """Answer many requests, many at once; results in the order of the requests.

        Requests begin in order, the next whenever one is answered, at most twice `max_num_seqs` at a time.

        Args:
            requests: Requests, mappings of their fields, or (image, prompt) pairs.
            on_error: "raise" raises the error of the first request, in their order, that fails, and aborts those after
                it; "return" puts the error in its request's place.
            progress: Show a progress bar; None: as the pipeline's `progress` option says.
        """
        if on_error not in ("raise", "return"):
            raise InvalidRequestError(f"on_error is 'raise' or 'return', not {on_error!r}")
        self._check_open()
        if not isinstance(requests, Iterable):
            raise InvalidRequestError(
                f"requests is a list or another iterable of requests, not a {type(requests).__name__}"
            )
        waiting = list(requests)
        # Twice what a step can take keeps the engine busy; more would only hold decoded pictures in memory.
        window = min(self._config.max_queue, 2 * self._config.max_num_seqs)
        with self._progress_bar(len(waiting), progress) as bar:
            return BatchRun(waiting, self._begin_like, window, on_error).run(bar.update)

    def abort(self, request_id: str) -> bool:
        """Give up the request of this id, wherever it is; from any thread. Who waits for it hears RequestAborted.

        The id is the request's own `request_id`, or a stream's. Returns whether there was one to give up.

        Raises:
            InvalidRequestError: `request_id` is no string.
        """
        self._check_open()
        check_request_id(request_id)
        with self._preparing_lock:
            preparing = request_id in self._preparing
            if preparing:
                self._preparing[request_id] = True
        if preparing:
            if self._lookahead.drop(request_id, RequestAborted(f"request {request_id} was aborted")):
                self._end_preparing(request_id)
            return True
        return self._engine.abort(request_id)

    # -- looking --------------------------------------------------------------------------------

    def prepare(self, request: RequestLike) -> ProcessedPrompt:
        """What the model would see: expanded ids, one placeholder range and the tensors of each image.

        Raises:
            InputError: An image can not be read, or prompt and images do not fit together.
        """
        self._check_open()
        return process_request(self._processor, as_request(request))

    def describe(self) -> dict[str, Any]:
        """What was loaded, and which paths were chosen and why; JSON-friendly. A closed pipeline says it as it was."""
        model = self._model
        if model is None:
            return self._last_description
        return {
            "folder": str(self._folder),
            **model.describe(),
            "processor": self._processor.describe(),
            "engine": self._engine.describe(),
        }

    def stats(self) -> dict[str, Any]:
        """Numbers of the engine right now: queue, running, cache use and hits; JSON-friendly."""
        self._check_open()
        return self._engine.stats()

    # -- ending ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the engine and all threads; whoever waits hears PipelineClosedError. Closing twice is fine.

        Weights, keys and values and encoded images are let go, even if this object is still known.
        """
        if self._closed:
            return
        self._closed = True
        self._lookahead.close(PipelineClosedError(_CLOSED))
        self._workers.shutdown(wait=False)  # what is in line there finds the pipeline closed, and says so
        self._engine.close()
        self._workers.shutdown(wait=True)
        self._last_description = self.describe()
        self._model = None
        self._processor.close()

    def __enter__(self) -> MMPipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside ---------------------------------------------------------------------------------

    def _run(self, request: GenerationRequest) -> GenerationOutput:
        handle = self._start(request)
        try:
            return handle.result()
        except BaseException:
            handle.abort()  # Ctrl-C while waiting: the engine must not go on for nobody
            raise

    def _start(self, request: GenerationRequest) -> RequestHandle:
        """Wait until the request is with the engine."""
        begun = self._begin(request)
        try:
            return begun.result(_bounded(request.timeout))
        except FutureTimeout:
            give_up(begun)
            raise _too_late(request) from None
        except BaseException:
            give_up(begun)
            raise

    async def _astart(self, request: GenerationRequest) -> RequestHandle:
        """As `_start`, awaited."""
        begun = self._begin(request)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(begun), _bounded(request.timeout))
        except asyncio.TimeoutError:
            give_up(begun)
            raise _too_late(request) from None
        except BaseException:
            give_up(begun)
            raise

    def _begin_like(self, value: RequestLike) -> Future[RequestHandle]:
        """As `_begin`; a malformed request becomes the future's error, in its own place of the batch."""
        try:
            return self._begin(as_request(value))
        except InvalidRequestError as error:
            failed: Future[RequestHandle] = Future()
            failed.set_exception(error)
            return failed

    def _begin(self, request: GenerationRequest) -> Future[RequestHandle]:
        """Process the request on a worker thread and hand it to the engine."""
        self._check_open()
        self._engine.check_caller()
        request_id = secrets.token_hex(8) if request.request_id is None else request.request_id
        with self._preparing_lock:
            if request_id in self._preparing:
                raise InvalidRequestError(f"a request with id {request_id!r} is still running")
            self._preparing[request_id] = False
        prepare = partial(self._prepare_and_submit, request, request_id, time.monotonic())
        try:
            if image_inputs(request):
                begun = self._lookahead.submit(request_id, request.priority, prepare)
            else:
                begun = self._workers.submit(lambda: prepare().handle)
        except (RuntimeError, PipelineClosedError):  # closed between the check and here
            self._end_preparing(request_id)
            self._check_open()
            raise
        begun.add_done_callback(lambda begun: begun.cancelled() and self._end_preparing(request_id))
        return begun

    def _prepare_and_submit(self, request: GenerationRequest, request_id: str, arrival: float) -> Prepared:
        try:
            prepared = self._prepare(request, request_id, arrival)
        except BaseException as error:
            drop_locals(error)
            raise
        finally:
            aborted = self._end_preparing(request_id)
        if aborted:
            prepared.handle.abort()
        return prepared

    def _end_preparing(self, request_id: str) -> bool:
        """The engine has the request, or nobody; returns whether it was aborted before."""
        with self._preparing_lock:
            return self._preparing.pop(request_id, False)

    def _prepare(self, request: GenerationRequest, request_id: str, arrival: float) -> Prepared:
        self._check_open()
        if self._preparing.get(request_id):
            raise RequestAborted(f"request {request_id} was aborted")
        began = time.monotonic()
        prompt = process_request(self._processor, request)
        give_back_after(prompt.new_bytes)
        end_idle_helpers()  # beside those of the engine's thread they would keep both asleep
        handle = self._engine.submit(
            prompt,
            request.sampling,
            request_id=request_id,
            priority=request.priority,
            timeout=request.timeout,
            arrival=arrival,
            preprocess=time.monotonic() - began,
            logits_processors=request.logits_processors,
        )
        return Prepared(handle, prompt.new_bytes)

    def _progress_bar(self, total: int, wanted: bool | None) -> Any:
        from tqdm import tqdm

        class Bar(tqdm):
            monitor_interval = 0  # tqdm's own thread, which ends with the program only, is not started

        setting = self._config.progress if wanted is None else ("on" if wanted else "off")
        disable = {"on": False, "off": True, "auto": None}[setting]  # None: tqdm shows it on a terminal only
        delay = 0 if setting == "on" else PROGRESS_DELAY
        return Bar(total=total, unit="request", disable=disable, delay=delay, miniters=1)

    def _check_open(self) -> None:
        if self._closed:
            raise PipelineClosedError(_CLOSED)


class DeltaStream(Iterator[StreamDelta]):
    """The deltas of one request, whose id is `request_id`. Closing it, or letting go of it, aborts the request."""

    def __init__(self, handle: RequestHandle) -> None:
        self._handle = handle
        self._deltas = iter(handle)
        self.request_id = handle.request_id

    def __next__(self) -> StreamDelta:
        return next(self._deltas)

    def close(self) -> None:
        """Abort the request, unless it is done."""
        self._handle.abort()

    def __del__(self) -> None:
        self.close()


def _bounded(timeout: float | None) -> float | None:
    """Seconds that a lock can wait; longer ones are for ever."""
    return timeout if timeout is None or timeout < threading.TIMEOUT_MAX else None


def _too_late(request: GenerationRequest) -> DeadlineExceeded:
    return DeadlineExceeded(f"the request was still being processed after its timeout of {request.timeout} s")
