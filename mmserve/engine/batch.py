"""What passes between the scheduler and a runner, and back: all that a runner, local or on another rank, ever gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from mmserve.types import SamplingParams

if TYPE_CHECKING:
    import torch

    from mmserve.errors import RequestError
    from mmserve.model.interface import PromptPlan
    from processors.types import ProcessedPrompt

__all__ = [
    "BlockCopy",
    "Fork",
    "ImageToEncode",
    "LogitsProcessor",
    "NewRequest",
    "PromptReport",
    "SampledToken",
    "ScheduledBatch",
    "ScheduledChunk",
    "StepOutput",
]


LogitsProcessor: TypeAlias = "Callable[[torch.Tensor, torch.Tensor], torch.Tensor]"
"""As transformers' LogitsProcessor: ids int64 [1, L] and scores float32 [1, V] to scores [1, V]."""


@dataclass(frozen=True, slots=True)
class Fork:
    """A further answer to a request: its own id and seed, the same prompt and options."""

    request_id: str
    seed: int


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that the runner has not seen yet; later steps name it by its id.

    Attributes:
        request_id: Unique in this engine.
        prompt: Expanded ids and images.
        plan: Positions and both-way spans.
        sampling: Fully resolved: no field is None that a default exists for.
        seed: Of the request's random choices; its own, or one drawn at admission.
        bad_words: Token sequences of `sampling.bad_words`.
        processors: The caller's own: (ids int64 [1, L], scores [1, V]) -> scores [1, V].
        forks: Further answers, which come to life when the first token is sampled.
    """

    request_id: str
    prompt: ProcessedPrompt
    plan: PromptPlan
    sampling: SamplingParams
    seed: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    processors: tuple[LogitsProcessor, ...] = ()
    forks: tuple[Fork, ...] = ()


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Tokens start..start+num_tokens-1 of one request, to be computed in this step.

    Attributes:
        request_id: Whose.
        start: Tokens already computed, cached ones included.
        num_tokens: At least 1.
        block_ids: Blocks added to each of the request's tables (one a cache group) in this step, in order; the whole
            tables if `restarted`. NO_BLOCK stands where nothing is read any more.
        restarted: First step, or first after a preemption: forget the old table.
        samples: The chunk ends at the last known token, so a new one is sampled from its logits.
        forks: Whether the request's forks begin here: they share its blocks, and each samples from the same logits.
    """

    request_id: str
    start: int
    num_tokens: int
    block_ids: tuple[tuple[int, ...], ...]
    restarted: bool
    samples: bool
    forks: bool = False


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Before the forward: copy block `source` to `target`, which takes its place in the request's table.

    A request is about to write to a block that others read too (forks that share a block that is not full)::

        before   table of a [ 4 | 7 ]   table of b [ 4 | 7 ]
        after    table of a [ 4 | 9 ]   table of b [ 4 | 7 ]      BlockCopy(a, group=0, index=1, source=7, target=9)
    """

    request_id: str
    group: int
    index: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class ImageToEncode:
    """Image number `index` of a request is needed in this step and its rows are not cached under `key`."""

    request_id: str
    index: int
    key: str


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step.

    Attributes:
        step: Running number.
        new: Requests that the runner must take in first.
        chunks: What to compute; each request at most once.
        copies: Blocks to copy before the forward.
        scrubbed: Blocks to fill with zeros after the copies: who had them failed or never got to finite logits, or they
            had moved out of a window, so there may be NaN in them, and a masked read of a slot that is not written yet
            would spread it (0 * NaN is NaN).
        encode: Images to encode before the forward.
        preempted: Requests that lost their blocks; the first thing that the runner hears of. Each comes back with a
            `restarted` chunk, or is finished (in this very step too).
        dropped_images: Keys whose rows the runner lets go of, before it encodes.
        finished: Requests that the runner forgets, after it has heard of the preempted ones and before all else.
    """

    step: int
    new: tuple[NewRequest, ...]
    chunks: tuple[ScheduledChunk, ...]
    copies: tuple[BlockCopy, ...]
    scrubbed: tuple[int, ...]
    encode: tuple[ImageToEncode, ...]
    preempted: tuple[str, ...]
    dropped_images: tuple[str, ...]
    finished: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        """Whether a runner would do nothing at all."""
        forgotten = self.preempted or self.dropped_images or self.finished
        return not (self.new or self.chunks or self.scrubbed or self.copies or self.encode or forgotten)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token, its log-probability, and the likeliest ones as (id, log-probability), if asked for."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptReport:
    """Prompt tokens start, start + 1, ... with their log-probabilities, as the tokens before them have it."""

    start: int
    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step produced.

    Attributes:
        sampled: Request id -> its new token; forks that begin included. None of a request that failed.
        failed: Request id -> why it failed, alone; its chunk's other results are void, and its forks do not begin.
            A fork that fails as it begins fails the request it comes from.
        prompt_reports: Request id -> log-probabilities of the prompt tokens that this step could see.
        image_bytes: Key of each image encoded in this step -> bytes of its rows.
        encode_seconds: Request id -> time in the vision tower.
    """

    sampled: Mapping[str, SampledToken]
    failed: Mapping[str, RequestError] = field(default_factory=dict)
    prompt_reports: Mapping[str, PromptReport] = field(default_factory=dict)
    image_bytes: Mapping[str, int] = field(default_factory=dict)
    encode_seconds: Mapping[str, float] = field(default_factory=dict)
