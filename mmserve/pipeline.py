"""`MMPipeline`: the public face. Holds a processor, a model and an engine; subclasses nothing."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from mmserve.config import EngineConfig
from mmserve.errors import InputError, InvalidRequestError, MMServeError, PipelineClosedError, UnsupportedModelError
from mmserve.requests import RequestLike, as_request, build_request
from mmserve.types import (
    GenerationOutput,
    GenerationRequest,
    ImageInput,
    ImagePart,
    Message,
    SamplingParams,
    StreamDelta,
    TextPart,
)
from processors.errors import ProcessorError, UnsupportedProcessorError

if TYPE_CHECKING:
    import torch

    from mmserve.engine.core import RequestHandle
    from processors import PromptProcessor
    from processors.types import ProcessedPrompt

__all__ = ["MMPipeline"]

Images: TypeAlias = Any
"""None, one image, or a sequence of images; an image is a path, bytes, file object, PIL image, array, tensor or URL."""


class MMPipeline:
    """A vision-language model, ready to answer, in this process.

        with MMPipeline("path-or-hub-id") as pipe:
            print(pipe.generate("photo.jpg", "What is on the table?").text)

    Safe to use from several threads at once.

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
        from mmserve.demo import demo_model_folder
        from mmserve.engine.core import Engine
        from mmserve.model import load_model
        from mmserve.model.generation import load_generation_config
        from mmserve.model.source import resolve_model_folder

        self._folder = demo_model_folder() if model is None else resolve_model_folder(model, revision)
        self._processor = _load_processor(self._folder, self._config, trust_remote_code)
        self._model = load_model(
            self._folder,
            dtype=dtype,
            device=device,
            attention_backend=self._config.attention_backend,
            block_size=self._config.block_size,
            trust_remote_code=trust_remote_code,
        )
        self._engine = Engine(
            self._model,
            self._processor.tokenizer,
            self._config,
            identity=str(self._folder),
            generation_config=load_generation_config(self._folder, trust_remote_code=trust_remote_code),
            device=self._model.describe()["device"],
        )
        self._workers = ThreadPoolExecutor(self._config.preprocess_threads, thread_name_prefix="mmserve-preprocess")
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
        **sampling_options: Any,
    ) -> GenerationOutput:
        """Answer one question about no, one or several images; or run a whole `GenerationRequest`.

        Args:
            image: None, one image or a sequence of them; or a request, and then nothing else is given.
            prompt: The question; one user turn through the model's chat template, images first.
            sampling, sampling_options: `SamplingParams` whole, or its fields one by one.
            raw: Take the prompt verbatim, with the model's own image tokens.
            processor_options: Options of the model's processor for this request.
            priority: Lower runs sooner.
            timeout: Seconds until the request is given up.

        Raises:
            InvalidRequestError: An option is unknown or out of range.
            InputError: An image can not be read, or prompt and images do not fit together.
            CapacityError: It can never fit this pipeline.
            RequestError: It failed otherwise; the pipeline goes on.
        """
        fields = _prompt_fields(image, prompt, raw, processor_options, priority, timeout)
        return self._run(fields, sampling, sampling_options)

    def chat(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        sampling: SamplingParams | None = None,
        processor_options: Mapping[str, Any] | None = None,
        priority: int = 0,
        timeout: float | None = None,
        **sampling_options: Any,
    ) -> GenerationOutput:
        """Answer the last turn of a conversation whose messages have OpenAI-style content parts.

        Raises:
            As `generate`; also InputError if the model has no chat template.
        """
        fields = {
            "messages": tuple(messages),
            "processor_options": dict(processor_options or {}),
            "priority": priority,
            "timeout": timeout,
        }
        return self._run(fields, sampling, sampling_options)

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
        **sampling_options: Any,
    ) -> Iterator[StreamDelta]:
        """As `generate`, yielding text as it comes; the deltas add up to the text, the last one has the output.

        The request starts with this call, not with the first delta. Closing the iterator aborts it.
        """
        fields = _prompt_fields(image, prompt, raw, processor_options, priority, timeout)
        return iter(self._begin(self._request(fields, sampling, sampling_options)).result())

    def generate_batch(
        self,
        requests: Iterable[RequestLike],
        *,
        on_error: Literal["raise", "return"] = "raise",
        progress: bool | None = None,
    ) -> list[GenerationOutput | MMServeError]:
        """Answer many requests, as many at once as fit; results in the order of the requests.

        Args:
            requests: Requests, mappings of their fields, or (image, prompt) pairs.
            on_error: "raise" aborts the rest at the first error; "return" puts the error in its place.
            progress: Show a progress bar; None: as the pipeline's `progress` option says.
        """
        if on_error not in ("raise", "return"):
            raise InvalidRequestError(f"on_error is 'raise' or 'return', not {on_error!r}")
        waiting = list(requests)
        results: list[GenerationOutput | MMServeError] = []
        inflight: deque[Future[RequestHandle]] = deque()
        window = min(self._config.max_queue, 2 * self._config.max_num_seqs)
        started = 0
        with self._progress_bar(len(waiting), progress) as bar:
            try:
                while len(results) < len(waiting):
                    while started < len(waiting) and len(inflight) < window:
                        inflight.append(self._begin_like(waiting[started]))
                        started += 1
                    results.append(_outcome(inflight.popleft(), on_error))
                    bar.update()
            except BaseException:
                for begun in inflight:
                    _give_up(begun)
                raise
        return results

    # -- looking --------------------------------------------------------------------------------

    def prepare(self, request: RequestLike) -> ProcessedPrompt:
        """What the model would see: expanded ids, one placeholder range and the tensors of each image.

        Raises:
            InputError: An image can not be read, or prompt and images do not fit together.
        """
        self._check_open()
        return self._process(as_request(request))

    def describe(self) -> dict[str, Any]:
        """What was loaded, and which paths were chosen and why; JSON-friendly."""
        return {
            "folder": str(self._folder),
            **self._model.describe(),
            "processor": self._processor.describe(),
            "engine": self._engine.describe(),
        }

    def stats(self) -> dict[str, Any]:
        """Numbers of the engine right now: queue, running, cache use and hits; JSON-friendly."""
        self._check_open()
        return dict(self._engine.stats())

    # -- ending ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the engine and its threads; whoever waits hears PipelineClosedError. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._engine.close()
        self._workers.shutdown(wait=True)

    def __enter__(self) -> MMPipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside ---------------------------------------------------------------------------------

    def _request(
        self, fields: GenerationRequest | Mapping[str, Any], sampling: SamplingParams | None, options: Mapping[str, Any]
    ) -> GenerationRequest:
        if not isinstance(fields, GenerationRequest):
            return build_request(fields, sampling, options)
        if sampling is not None or options:
            raise InvalidRequestError("a GenerationRequest carries its own sampling: give nothing beside it")
        return fields

    def _run(
        self, fields: GenerationRequest | Mapping[str, Any], sampling: SamplingParams | None, options: Mapping[str, Any]
    ) -> GenerationOutput:
        handle = self._begin(self._request(fields, sampling, options)).result()
        try:
            return handle.result()
        except BaseException:
            handle.abort()  # Ctrl-C while waiting: the engine must not go on for nobody
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
        return self._workers.submit(self._prepare_and_submit, request, time.monotonic())

    def _prepare_and_submit(self, request: GenerationRequest, arrival: float) -> RequestHandle:
        prompt = self._process(request)
        return self._engine.submit(
            prompt, request.sampling, priority=request.priority, timeout=request.timeout, arrival=arrival
        )

    def _process(self, request: GenerationRequest) -> ProcessedPrompt:
        try:
            if request.messages is not None:
                return self._processor.process(
                    [_plain_message(message) for message in request.messages],
                    options=request.processor_options,
                    image_ids=[image.uuid for image in _images_of(request.messages)],
                )
            return self._processor.process(
                request.prompt or "",
                [image.source for image in request.images],
                raw=request.raw,
                options=request.processor_options,
                image_ids=[image.uuid for image in request.images],
            )
        except ProcessorError as error:
            raise InputError(str(error)) from error

    def _progress_bar(self, total: int, wanted: bool | None) -> Any:
        from tqdm import tqdm

        setting = self._config.progress if wanted is None else ("on" if wanted else "off")
        disable = {"on": False, "off": True, "auto": None}[setting]  # None: tqdm shows it on a terminal only
        return tqdm(total=total, unit="request", disable=disable, delay=0 if setting == "on" else 2.0)

    def _check_open(self) -> None:
        if self._closed:
            raise PipelineClosedError("this pipeline was closed: make a new one")


def _load_processor(folder: Path, config: EngineConfig, trust_remote_code: bool) -> PromptProcessor:
    from processors import MediaOptions, PromptProcessor

    media = MediaOptions(
        max_pixels=config.max_image_pixels,
        max_bytes=config.max_image_bytes,
        background=config.alpha_background,
        allow_private_addresses=config.allow_private_urls,
        file_root=None if config.allowed_media_root is None else str(config.allowed_media_root),
    )
    try:
        return PromptProcessor.from_pretrained(folder, media=media, trust_remote_code=trust_remote_code)
    except UnsupportedProcessorError as error:
        raise UnsupportedModelError(str(error)) from error


def _prompt_fields(
    image: Images | GenerationRequest,
    prompt: str | None,
    raw: bool,
    processor_options: Mapping[str, Any] | None,
    priority: int,
    timeout: float | None,
) -> GenerationRequest | dict[str, Any]:
    if isinstance(image, GenerationRequest):
        if prompt is not None or raw or processor_options or priority or timeout is not None:
            raise InvalidRequestError("a GenerationRequest carries its own fields: give nothing beside it")
        return image
    return {
        "prompt": prompt if prompt is not None else "",
        "images": image,
        "raw": raw,
        "processor_options": dict(processor_options or {}),
        "priority": priority,
        "timeout": timeout,
    }


def _images_of(messages: Sequence[Message]) -> list[ImageInput]:
    """The images of a conversation, in order."""
    parts = (part for message in messages if not isinstance(message.content, str) for part in message.content)
    return [part.image for part in parts if isinstance(part, ImagePart)]


def _plain_message(message: Message) -> dict[str, Any]:
    """The message as `processors` takes it: a dict of role and content parts."""
    if isinstance(message.content, str):
        return {"role": message.role, "content": message.content}
    return {"role": message.role, "content": [_plain_part(part) for part in message.content]}


def _plain_part(part: TextPart | ImagePart) -> dict[str, Any]:
    if isinstance(part, ImagePart):
        return {"type": "image", "image": part.image.source}
    return {"type": "text", "text": part.text}


def _outcome(begun: Future[RequestHandle], on_error: str) -> GenerationOutput | MMServeError:
    try:
        return begun.result().result()
    except MMServeError as error:
        if on_error == "raise":
            raise
        return error


def _give_up(begun: Future[RequestHandle]) -> None:
    """Abort a request of a batch that has failed, wherever it is."""
    if begun.cancel():
        return
    begun.add_done_callback(lambda done: None if done.cancelled() or done.exception() else done.result().abort())
