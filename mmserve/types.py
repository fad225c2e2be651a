"""What a user hands in and gets back: pydantic types that refuse unknown fields and round-trip through JSON."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BeforeValidator,
    Field,
    FieldSerializationInfo,
    GetCoreSchemaHandler,
    WithJsonSchema,
    field_serializer,
    field_validator,
    model_validator,
)
from pydantic_core import core_schema

from mmserve.errors import InvalidRequestError
from mmserve.schema import Bool, Float, Int, Schema

__all__ = [
    "Content",
    "FinishReason",
    "GenerationOutput",
    "GenerationRequest",
    "ImageInput",
    "ImagePart",
    "Logprob",
    "Message",
    "Metrics",
    "SamplingParams",
    "StreamDelta",
    "TextPart",
    "TokenLogprobs",
    "Usage",
]

MAX_LOGPROBS = 100
"""Most alternatives a position that can be asked for."""

MAX_ANSWERS = 64
"""Most answers to one request."""

MAX_INT = 2**31 - 1
"""Largest count that can be asked for, so that every one fits a tensor."""

MIN_TEMPERATURE = 1e-3
"""Smallest temperature besides 0; below it every choice is the likeliest token anyway."""

MAX_LOGIT_BIAS = 1e4
"""Largest number added to a logit, either way; far beyond any logit, and still exact beside one."""

ImageSource: TypeAlias = Annotated[
    Any,
    WithJsonSchema(
        {
            "type": "string",
            "description": "A file path, an http(s) URL, or a data URL. In Python also bytes, a file object, a PIL "
            "image, a numpy array or a torch tensor; these become a data URL in JSON.",
        }
    ),
]


class _Unchanged:
    """The type of what is dumped as it is: pydantic would turn a dataclass into a dictionary, in Python too."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.any_schema(serialization=core_schema.to_string_ser_schema(when_used="json"))


LogitsProcessor: TypeAlias = Annotated[Any, WithJsonSchema({"not": {}, "description": "Python code: not in JSON."})]


class ImageInput(Schema):
    """One image and, if the caller has one, its identity."""

    source: ImageSource
    uuid: str | None = Field(
        default=None,
        min_length=1,
        max_length=256,
        description="Caller's own id of this exact picture, in place of a hash of its pixels: "
        "equal ids must mean equal pictures.",
    )

    @field_validator("source")
    @classmethod
    def _present(cls, source: Any) -> Any:
        if source is None or (isinstance(source, str) and not source.strip()):
            raise ValueError("an image needs a path, URL, bytes, or a picture in memory")
        return source

    @field_serializer("source")
    def _source_as_string(self, source: Any, info: FieldSerializationInfo) -> Annotated[Any, _Unchanged]:
        return _source_to_string(source) if info.mode_is_json() else source


def _source_to_string(source: Any) -> str:
    """A path or URL as it is; anything else as a data URL (pictures in memory as lossless PNG of their RGB pixels)."""
    if isinstance(source, (str, Path)):
        return str(source)
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _data_url("application/octet-stream", bytes(source))
    import io

    from processors import ImageFeatures, load_image

    if isinstance(source, ImageFeatures):
        raise InvalidRequestError("image features can not be written as JSON: they are given in Python only")
    buffer = io.BytesIO()
    load_image(source).save(buffer, format="PNG")
    return _data_url("image/png", buffer.getvalue())


def _data_url(media_type: str, payload: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(payload).decode('ascii')}"


class TextPart(Schema):
    """A piece of text in a message. An image token of the model typed in here stays text."""

    type: Literal["text"] = "text"
    text: str


class ImagePart(Schema):
    """A picture in a message, at the place where it stands.

    Accepts `{"type": "image", "image": source}` and OpenAI's `{"type": "image_url", "image_url": {"url": ...}}`,
    whose URL is http(s) or data: never a local path.
    """

    type: Literal["image"] = "image"
    image: ImageInput

    @model_validator(mode="before")
    @classmethod
    def _from_openai(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        value = dict(value)
        if "image_url" in value and "image" in value:
            raise ValueError("an image part has either 'image' or 'image_url', not both")
        if value.get("type") == "image_url" or "image_url" in value:
            value.update(type="image", image=_linked(value.pop("image_url", None)))
        if "image" in value:
            value["image"] = as_image_input(value["image"])
        return value


def _linked(link: Any) -> str:
    """The URL of an `image_url` part. Such parts often come from elsewhere, so a bare path must not open a file."""
    if isinstance(link, dict):
        unknown = set(link) - {"url", "detail"}
        if unknown or link.get("detail", "auto") != "auto":
            raise ValueError("image_url takes 'url' alone: detail is the processor's own, see processor_options")
        link = link.get("url")
    if not isinstance(link, str) or not link.lower().startswith(("http://", "https://", "data:")):
        raise ValueError(
            "image_url takes an http(s) or data URL; a local file goes as {'type': 'image', 'image': path}"
        )
    return link


def as_image_input(value: Any) -> Any:
    """Wrap a bare source; leave an `ImageInput`, or its JSON form, alone."""
    if isinstance(value, ImageInput) or (isinstance(value, dict) and "source" in value):
        return value
    return {"source": value}


Content: TypeAlias = str | list[TextPart | ImagePart]
"""What a message says: a string, or text and image parts in order."""


class Message(Schema):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Content

    @field_validator("content", mode="before")
    @classmethod
    def _typed_parts(cls, content: Any) -> Any:
        if not isinstance(content, (list, tuple)):
            return content
        return [_as_part(part) for part in content]


def _as_part(part: Any) -> Any:
    """Choose the part's class by its `type`, so that an error speaks of that class alone."""
    if isinstance(part, str):
        return TextPart(text=part)
    if not isinstance(part, dict):
        return part
    kind = part.get("type")
    if kind == "text":
        return TextPart.model_validate(part)
    if kind == "image" or kind == "image_url":
        return ImagePart.model_validate(part)
    raise ValueError(f"a content part has type 'text', 'image' or 'image_url', not {str(kind)[:40]!r}")


LogitBias: TypeAlias = Annotated[Float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS, allow_inf_nan=False)]


def _no_bool(value: Any) -> Any:
    if isinstance(value, (bool, float)):
        raise ValueError(f"a token id is a whole number, not {value!r}")
    return value


TokenKey: TypeAlias = Annotated[int, BeforeValidator(_no_bool)]
"""A token id as a key; in JSON keys are strings."""


class SamplingParams(Schema):
    """How tokens are chosen. A field left at None takes the model's own generation config, shown by `describe()`."""

    max_tokens: Int | None = Field(
        default=None,
        ge=1,
        le=MAX_INT,
        description="Most tokens to generate. None: the model's generation config, else 256.",
    )
    min_tokens: Int = Field(
        default=0, ge=0, le=MAX_INT, description="No end token or stop string ends the text before this many."
    )
    temperature: Float | None = Field(
        default=None,
        ge=0.0,
        le=100.0,
        allow_inf_nan=False,
        description="0 is greedy, else at least 0.001. None: the model's own; greedy if it does not sample.",
    )
    top_k: Int | None = Field(
        default=None, ge=0, le=MAX_INT, description="Sample from the k likeliest tokens; 0: from all."
    )
    top_p: Float | None = Field(
        default=None,
        gt=0.0,
        le=1.0,
        allow_inf_nan=False,
        description="Sample from the likeliest tokens that hold this probability.",
    )
    min_p: Float | None = Field(
        default=None,
        ge=0.0,
        le=1.0,
        allow_inf_nan=False,
        description="Drop tokens less likely than min_p times the likeliest.",
    )
    repetition_penalty: Float | None = Field(
        default=None,
        ge=1e-3,
        le=1e3,
        allow_inf_nan=False,
        description="Divide (or multiply, if negative) logits of prompt and output tokens.",
    )
    presence_penalty: Float = Field(
        default=0.0, ge=-2.0, le=2.0, allow_inf_nan=False, description="Subtract from tokens already generated."
    )
    frequency_penalty: Float = Field(
        default=0.0,
        ge=-2.0,
        le=2.0,
        allow_inf_nan=False,
        description="Subtract, times the count, from tokens already generated.",
    )
    logit_bias: dict[TokenKey, LogitBias] = Field(
        default_factory=dict, description="Token id -> number added to its logit, -10000 to 10000."
    )
    bad_words: tuple[str, ...] = Field(default=(), description="Strings whose token sequences are never completed.")
    allowed_token_ids: tuple[Int, ...] | None = Field(
        default=None, min_length=1, description="Sample only from these ids."
    )
    stop: tuple[str, ...] = Field(default=(), description="Strings that end the text; never part of it.")
    stop_token_ids: tuple[Int, ...] = Field(default=(), description="Ids that end the text, besides the model's own.")
    ignore_eos: Bool = Field(default=False, description="Go on past the model's own end tokens.")
    seed: Int | None = Field(
        default=None,
        ge=0,
        lt=2**63,
        description="The same random numbers each time; in float32 the same answer, whatever else is in the batch. In "
        "bfloat16 and float16, products round by the batch's shape: a random answer may change with it.",
    )
    n: Int = Field(
        default=1,
        ge=1,
        le=MAX_ANSWERS,
        description="Answers to draw; the first is the output, the further ones its `others`.",
    )
    logprobs: Int | None = Field(
        default=None,
        ge=0,
        le=MAX_LOGPROBS,
        description="Report each token's log-probability and that of this many likeliest. None: no report.",
    )

    prompt_logprobs: Int | None = Field(
        default=None,
        ge=0,
        le=MAX_LOGPROBS,
        description="Report the same of every prompt token. The prompt is then computed in full, cached or not. "
        "Not on the generate() path.",
    )

    @field_validator("temperature")
    @classmethod
    def _greedy_or_not(cls, value: float | None) -> float | None:
        if value is not None and 0.0 < value < MIN_TEMPERATURE:
            raise ValueError(f"0 (greedy) or at least {MIN_TEMPERATURE}, not {value}")
        return value

    @field_validator("stop", "bad_words", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("stop", "bad_words")
    @classmethod
    def _not_empty(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if any(not text for text in value):
            raise ValueError("an empty string is never a stop string or a bad word")
        for text in value:
            if half := re.search("[\ud800-\udfff]", text):
                raise ValueError(
                    f"half a surrogate pair, U+{ord(half[0]):04X} at place {half.start()}, is no character, so it is "
                    "never in an answer: leave it out"
                )
        return value

    @model_validator(mode="after")
    def _consistent(self) -> SamplingParams:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}")
        return self


class GenerationRequest(Schema):
    """One request: either a `prompt` with `images`, or `messages` that hold their own.

    A plain prompt becomes one user turn through the model's chat template, images first. With `raw=True` it
    is taken verbatim, with the model's own image tokens (or `<image>` marks).
    """

    prompt: str | None = Field(default=None, description="The question. Not together with messages.")
    images: tuple[ImageInput, ...] = Field(default=(), description="The prompt's pictures, in order.")
    messages: tuple[Message, ...] | None = Field(
        default=None,
        min_length=1,
        description="A conversation with pictures inside. Not together with prompt or images.",
    )
    raw: Bool = Field(default=False, description="Take the prompt verbatim, without the chat template.")
    sampling: SamplingParams = Field(default_factory=SamplingParams)
    processor_options: dict[str, Any] = Field(
        default_factory=dict,
        description="Options of the model's own processor for this request (max_pixels, ...).",
    )
    priority: Int = Field(
        default=0, ge=-MAX_INT, le=MAX_INT, description="Lower runs sooner; equal ones in order of arrival."
    )
    timeout: Float | None = Field(
        default=None, gt=0.0, allow_inf_nan=False, description="Seconds until the request is given up."
    )
    request_id: str | None = Field(
        default=None,
        min_length=1,
        max_length=128,
        pattern="^[^#]+$",
        description="Your own id, to abort it by; unique among the requests that are not done. None: one is made up.",
    )
    logits_processors: tuple[LogitsProcessor, ...] = Field(
        default=(),
        repr=False,
        description="Your own code, called in turn for each token before temperature and what follows it, as "
        "transformers' LogitsProcessor: (ids int64 [1, L], scores float32 [1, V]) -> scores. It runs in the engine's "
        "thread; one that raises fails its request. A request that has any can not be written as JSON.",
    )

    @field_validator("logits_processors", mode="before")
    @classmethod
    def _callables(cls, processors: Any) -> Any:
        if not isinstance(processors, (list, tuple)) or not all(map(callable, processors)):
            raise ValueError("a list of callables, (ids, scores) -> scores")
        return tuple(processors)

    @field_serializer("logits_processors", when_used="json")
    def _no_code_in_json(self, processors: tuple[Any, ...]) -> list[str]:
        if processors:
            raise ValueError("a request with logits_processors can not be written as JSON: they are code")
        return []

    @field_validator("images", mode="before")
    @classmethod
    def _wrap_images(cls, images: Any) -> Any:
        if images is None:
            return ()
        if isinstance(images, (list, tuple)):
            return tuple(as_image_input(image) for image in images)
        return (as_image_input(images),)

    @model_validator(mode="after")
    def _one_kind(self) -> GenerationRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either a prompt or messages")
        if self.messages is not None and (self.images or self.raw):
            raise ValueError("messages hold their own images and go through the template: no images=, no raw=True")
        if self.prompt is not None and not self.prompt.strip() and not self.images:
            raise ValueError("an empty prompt needs at least one image")
        return self


FinishReason: TypeAlias = Literal["stop", "length"]
"""stop: an end token or a stop string; length: max_tokens reached."""


class Logprob(Schema):
    """One token and its log-probability (natural logarithm)."""

    token_id: Int
    logprob: Float
    text: str = ""


class TokenLogprobs(Schema):
    """A token and the likeliest ones in its place, likeliest first."""

    chosen: Logprob
    top: tuple[Logprob, ...] = ()


class Usage(Schema):
    """Tokens counted on the expanded prompt; `image_tokens` and `cached_tokens` are parts of `prompt_tokens`."""

    prompt_tokens: Int = Field(ge=0)
    image_tokens: Int = Field(ge=0, description="Prompt tokens that stand for images, structural ones included.")
    cached_tokens: Int = Field(ge=0, description="Prompt tokens whose keys and values were already in the cache.")
    completion_tokens: Int = Field(ge=0)


class Metrics(Schema):
    """Times of one request, in seconds."""

    preprocess: Float = Field(ge=0.0, description="Reading the images and building the prompt, not waiting to do so.")
    queue: Float = Field(
        ge=0.0,
        description="Waiting until the first step that computes some of it begins: for a worker that reads the "
        "images, then for a place in the batch. From the call to that step, without `preprocess`.",
    )
    encode: Float = Field(
        ge=0.0,
        description="In the vision tower, for this request's own images. 0 if they were cached, and on the "
        "generate() path, where the tower runs inside the first forward.",
    )
    first_token: Float = Field(ge=0.0, description="From the call to the first token.")
    per_token: Float | None = Field(
        default=None, ge=0.0, description="Mean after the first token; None if there was one."
    )
    total: Float = Field(ge=0.0, description="From the call to the last token.")


class GenerationOutput(Schema):
    """The answer. `token_ids` are the generated ones, an end token included if it was generated.

    If `n` answers were asked for, `others` holds the n - 1 further ones; they share the prompt's work, and each
    repeats its usage.
    """

    text: str
    token_ids: tuple[Int, ...]
    finish_reason: FinishReason
    usage: Usage
    metrics: Metrics
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = Field(
        default=None,
        description="One entry a token of the expanded prompt; None for the first, and where an image's row stands.",
    )
    request_id: str = ""
    others: tuple[GenerationOutput, ...] = ()


class StreamDelta(Schema):
    """New text of a stream; the deltas' texts add up to the output's text. The last one has the `output`."""

    text: str
    token_ids: tuple[Int, ...] = ()
    output: GenerationOutput | None = None
