"""One answer as it grows: its tokens, text, end and times. No tensors."""

from __future__ import annotations

from dataclasses import dataclass

from mmserve.engine.batch import PromptReport, SampledToken
from mmserve.engine.detokenizer import Detokenizer, TextDecoder
from mmserve.types import (
    FinishReason,
    GenerationOutput,
    Logprob,
    Metrics,
    SamplingParams,
    StreamDelta,
    TokenLogprobs,
    Usage,
)
from processors.types import ProcessedPrompt

__all__ = ["Answer", "AnswerTimes"]


@dataclass(frozen=True, slots=True)
class AnswerTimes:
    """What happened before a request came to the engine, on the clock of `time.monotonic()`.

    Attributes:
        arrival: When the user called.
        preprocess: Seconds of reading images and building the prompt.
    """

    arrival: float
    preprocess: float


class Answer:
    """Collects what a request's steps bring.

    Args:
        request_id: Of the request that it answers.
        prompt: Expanded ids and images.
        sampling: Resolved.
        decoder: The engine's.
        times: What happened before.
    """

    def __init__(
        self,
        request_id: str,
        prompt: ProcessedPrompt,
        sampling: SamplingParams,
        decoder: TextDecoder,
        times: AnswerTimes,
    ) -> None:
        self.request_id = request_id
        self.finish_reason: FinishReason | None = None
        self.num_cached = 0
        self.encode_seconds = 0.0
        self.first_scheduled = times.arrival + times.preprocess
        self._sampling = sampling
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._decoder = decoder
        self._detokenizer = Detokenizer(decoder, sampling.stop, sampling.min_tokens)
        self._num_prompt = len(prompt.token_ids)
        self._num_image = prompt.num_image_tokens
        self._times = times
        self._first_token = 0.0
        self._last_token = 0.0
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: dict[int, TokenLogprobs] = {}
        self._row_positions: frozenset[int] = frozenset()
        if sampling.prompt_logprobs is not None:
            # What stands at an image's row is a placeholder that nobody predicts.
            self._row_positions = frozenset(i for image in prompt.images for i in image.range.embed_positions())
        self._sent = 0
        self._last_text = ""

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self._token_ids)

    def take(self, token: SampledToken, now: float) -> StreamDelta | None:
        """Add a token, and see whether it ends the answer; returns a delta if text can be released before the end."""
        if not self._token_ids:
            self._first_token = now
        self._last_token = now
        self._token_ids.append(token.token_id)
        if token.logprob is not None:
            self._logprobs.append(self._describe(token))
        text = self._detokenizer.push(token.token_id)
        count = len(self._token_ids)
        if (token.token_id in self._stop_ids and count > self._sampling.min_tokens) or self._detokenizer.stopped:
            self.finish_reason = "stop"
        elif count >= (self._sampling.max_tokens or 0):
            self.finish_reason = "length"
        if self.finish_reason is not None:
            self._last_text = text
            return None
        return StreamDelta(text=text, token_ids=self._unsent()) if text else None

    def take_prompt_report(self, report: PromptReport) -> None:
        """Note log-probabilities of prompt tokens; told twice after a preemption, the same."""
        for position, token in enumerate(report.tokens, report.start):
            if position not in self._row_positions:
                self._prompt_logprobs[position] = self._describe(token)

    def complete(self) -> GenerationOutput:
        """The whole answer; call once, after `finish_reason` was set, and before `last_delta`."""
        self._last_text += self._detokenizer.finish()
        if self._detokenizer.stopped:
            self.finish_reason = "stop"  # the last characters, settled only now, hold a stop string
        count = len(self._token_ids)
        times = self._times
        decode = (self._last_token - self._first_token) / (count - 1) if count > 1 else None
        assert self.finish_reason is not None
        return GenerationOutput(
            text=self._detokenizer.text,
            token_ids=tuple(self._token_ids),
            finish_reason=self.finish_reason,
            usage=Usage(
                prompt_tokens=self._num_prompt,
                image_tokens=self._num_image,
                cached_tokens=self.num_cached,
                completion_tokens=count,
            ),
            metrics=Metrics(
                preprocess=times.preprocess,
                queue=max(0.0, self.first_scheduled - times.arrival - times.preprocess),
                encode=self.encode_seconds,
                first_token=max(0.0, self._first_token - times.arrival),
                per_token=decode,
                total=max(0.0, self._last_token - times.arrival),
            ),
            logprobs=tuple(self._logprobs) if self._sampling.logprobs is not None else None,
            prompt_logprobs=self._prompt_report(),
            request_id=self.request_id,
        )

    def last_delta(self, output: GenerationOutput) -> StreamDelta:
        """The stream's end: text held back until now, and the whole answer."""
        return StreamDelta(text=self._last_text, token_ids=self._unsent(), output=output)

    def _prompt_report(self) -> tuple[TokenLogprobs | None, ...] | None:
        if not self._prompt_logprobs:
            return (None,) * self._num_prompt if self._sampling.prompt_logprobs is not None else None
        return tuple(self._prompt_logprobs.get(position) for position in range(self._num_prompt))

    def _unsent(self) -> tuple[int, ...]:
        token_ids = tuple(self._token_ids[self._sent :])
        self._sent = len(self._token_ids)
        return token_ids

    def _describe(self, token: SampledToken) -> TokenLogprobs:
        def named(token_id: int, logprob: float) -> Logprob:
            return Logprob(token_id=token_id, logprob=logprob, text=self._decoder.decode_one(token_id))

        assert token.logprob is not None
        top = tuple(named(token_id, value) for token_id, value in token.top)
        return TokenLogprobs(chosen=named(token.token_id, token.logprob), top=top)
