"""One submitted request inside the engine: its answers (several if `n` says so) and its owner's handle."""

from __future__ import annotations

from mmserve.engine.answer import Answer
from mmserve.engine.batch import SampledToken
from mmserve.engine.handle import RequestHandle
from mmserve.types import GenerationOutput, StreamDelta

__all__ = ["Ticket"]


class Ticket:
    """Gathers the answers to one request; all of them succeed, or the request fails. `closed` once it is over.

    Args:
        handle: Its owner's end.
        answers: By id, the first one under the request's own. The stream shows the first one.
    """

    def __init__(self, handle: RequestHandle, answers: dict[str, Answer]) -> None:
        self.handle = handle
        self.answers = answers
        self.closed = False
        self._open = set(answers)
        self._outputs: dict[str, GenerationOutput] = {}
        self._last_delta: StreamDelta | None = None

    @property
    def request_id(self) -> str:
        """The request's own id."""
        return self.handle.request_id

    @property
    def open_ids(self) -> frozenset[str]:
        """Answers that have not ended yet."""
        return frozenset(self._open)

    @property
    def done(self) -> bool:
        """Whether all answers have ended."""
        return not self._open

    def take(self, answer_id: str, token: SampledToken, now: float) -> bool:
        """Add a token to an answer; returns whether that ended it."""
        answer = self.answers[answer_id]
        delta = answer.take(token, now)
        first = answer_id == self.request_id
        if delta is not None and first:
            self.handle.put(delta)
        if answer.finish_reason is None:
            return False
        output = self._outputs[answer_id] = answer.complete()
        self._open.remove(answer_id)
        if first:
            self._last_delta = answer.last_delta(output)
        return True

    def deliver(self) -> None:
        """All answers have ended: hand them over."""
        first, *others = (self._outputs[answer_id] for answer_id in self.answers)
        assert self._last_delta is not None
        # The prompt was computed once, and reported on to the first answer.
        shared = tuple(other.model_copy(update={"prompt_logprobs": first.prompt_logprobs}) for other in others)
        output = first.model_copy(update={"others": shared}) if shared else first
        self.handle.finish(self._last_delta.model_copy(update={"output": output}), output)
