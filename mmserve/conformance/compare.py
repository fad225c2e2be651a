"""A subject's prompts in packed batches against each of them alone through `generate()`, in several forms.

together   all prompts in one batch a step, each prompt in one piece
chunks     each step takes at most 5 tokens of a request: fewer than any image has
late       at most 3, and every request joins two steps after the one before, so prefill meets decode
warm       every prompt twice, the second time on the blocks that the first one filled
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

import torch

from mmserve.conformance.packed import Answer, PackedRun, run_rounds
from mmserve.conformance.reference import Reference
from mmserve.conformance.subject import Subject
from mmserve.errors import ConformanceError, MMServeError
from mmserve.model import load_model
from mmserve.model.interface import Model
from processors.types import ProcessedPrompt

__all__ = ["FORMS", "SHORT", "TOLERANCE", "Comparison", "Form", "Result", "run_subject"]

TOLERANCE: Final = 1e-4
"""Largest difference of a log-probability, float32."""
BLOCK_SIZE: Final = 8
"""Small, so that even a short prompt fills a block that a warm cache can give back."""


@dataclass(frozen=True, slots=True)
class Form:
    """One way of batching.

    Attributes:
        chunk: Most tokens of one request in a step. stagger: Steps after which the next request joins.
        warm: Whether each prompt is asked again, over the blocks that it filled before.
    """

    name: str
    chunk: int = 10**9
    stagger: int = 0
    warm: bool = False


FORMS: Final = (Form("together", warm=True), Form("chunks", chunk=5), Form("late", chunk=3, stagger=2))
"""The long form."""
SHORT: Final = (Form("late and warm", chunk=3, stagger=1, warm=True),)
"""One run that has everything in it."""


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one subject.

    Attributes:
        path: "paged" or "generate". reason: Why that path, as `describe()` says it.
        worst: The largest difference of a log-probability. failure: What differed, or why it does not load.
    """

    name: str
    path: str
    reason: str
    compared: str
    worst: float | None
    failure: str | None = None


class Comparison:
    """A subject's model, loaded by us, and what plain transformers says."""

    def __init__(self, subject: Subject, *, path: Literal["auto", "paged", "generate"] = "auto") -> None:
        self.subject = subject
        self.worst = 0.0
        self._path = path
        self._expected: dict[int, list[Answer]] = {}

    @property
    def prompts(self) -> Sequence[ProcessedPrompt]:
        """The subject's."""
        return self.subject.prompts

    @cached_property
    def model(self) -> Model:
        """Ours; loaded when it is first asked for. Raises ModelLoadError."""
        return load_model(
            self.subject.folder, dtype=torch.float32, block_size=BLOCK_SIZE, device="cpu", path=self._path
        )

    def expected(self, new_tokens: int) -> list[Answer]:
        """The reference's answers. Its model is let go of at once: two at a time may be more than fits."""
        if new_tokens not in self._expected:
            reference = Reference(self.subject.folder, self.subject.inputs)
            self._expected[new_tokens] = reference.answers(self.prompts, new_tokens)
        return self._expected[new_tokens]

    def compare(self, *, new_tokens: int, chunk: int = 10**9, stagger: int = 0, warm: bool = False) -> None:
        """All prompts in packed batches against each alone through `generate()`.

        Raises:
            ConformanceError: Ids differ, or a log-probability by more than 1e-4.
        """
        expected = self.expected(new_tokens)
        run = PackedRun(new_tokens, chunk, BLOCK_SIZE, stagger, rounds=2 if warm else 1)
        for number, answers in enumerate(run_rounds(self.model, self.prompts, run)):
            for index, (answer, right) in enumerate(zip(answers, expected, strict=True)):
                where = f"prompt {index}" + (", asked again on a warm cache" if number else "")
                self._check(answer, right, where)

    def _check(self, answer: Answer, expected: Answer, where: str) -> None:
        if answer.token_ids != expected.token_ids:
            raise ConformanceError(f"{where}: ids {answer.token_ids}, and generate() gives {expected.token_ids}")
        ours, theirs = torch.stack(answer.logprobs), torch.stack(expected.logprobs)
        finite = torch.isfinite(theirs)
        difference = float((ours - theirs)[finite].abs().max())
        self.worst = max(self.worst, difference)
        if not difference <= TOLERANCE:
            raise ConformanceError(f"{where}: log-probabilities differ by {difference:.1e}, more than {TOLERANCE:.0e}")


def run_subject(subject: Subject, *, new_tokens: int = 32, forms: Sequence[Form] = FORMS) -> Result:
    """Compare in every form; what fails is in the result and not raised, so that a run over many goes on."""
    comparison = Comparison(subject)
    try:
        for form in forms:
            comparison.compare(new_tokens=new_tokens, chunk=form.chunk, stagger=form.stagger, warm=form.warm)
    except MMServeError as error:
        return Result(subject.name, "", "", subject.compared, None, f"{type(error).__name__}: {error}")
    about = comparison.model.describe()
    path, reason = str(about["path"]), str(about["path_reason"])
    return Result(subject.name, path, reason, subject.compared, comparison.worst)
