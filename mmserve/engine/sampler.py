"""From logits to tokens, for the whole batch at once, with every row's own options.

The order is that of transformers' `generate` (logits_process.py), so that equal options mean equal answers::

    bias -> repetition, presence, frequency penalties -> bad words -> end tokens before min_tokens -> allowed ids
         -> the caller's own processors -> temperature -> top_k -> top_p -> min_p -> choice

Forbidden ids (the model's placeholders, and rows of the head that no token has) are never chosen. A row whose best
score is not finite is its request's error. Log-probabilities that a request asks for are those of the model itself:
`log_softmax` of the logits before any of the above.

A random choice takes one number from (seed, index of the token in the answer), so it depends neither on the batch
nor on preemption: the token is where that number falls in the running sum of the probabilities, in vocabulary order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

import torch

from mmserve.engine.batch import LogitsProcessor, SampledToken
from mmserve.engine.choice import NEG_INF, choose
from mmserve.engine.random import uniform
from mmserve.errors import RequestError
from mmserve.types import SamplingParams

__all__ = ["Sampler", "SequenceState", "describe_tokens"]

_LARGEST = float(torch.finfo(torch.float32).max)
_LEAST_TEMPERATURE = 1e-6
"""What a smaller one is taken for: a number that float32 can divide by."""


class SequenceState:
    """What the sampler remembers of one request.

    Args:
        params: Resolved options.
        seed: Of its random choices.
        bad_words: Token sequences that must not be completed.
        prompt_ids: Expanded prompt.
        vocab_size: V.
        device: Where the logits are.
        processors: The caller's own.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        bad_words: Sequence[tuple[int, ...]],
        prompt_ids: Sequence[int],
        vocab_size: int,
        device: torch.device,
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        self.params = params
        self.processors = tuple(processors)
        self.ids = list(prompt_ids) if processors else []
        self.seed = seed
        self.bad_words = tuple(bad_words)
        self.num_generated = 0
        self.longest_bad_word = max(map(len, bad_words), default=0)
        # Only the tail that a bad word could begin in; the whole sequence is the runner's.
        self.tail = list(prompt_ids[-self.longest_bad_word :]) if bad_words else []
        self.seen: torch.Tensor | None = None
        self.counts: torch.Tensor | None = None
        if params.repetition_penalty != 1.0:
            ids = torch.tensor([i for i in set(prompt_ids) if 0 <= i < vocab_size], dtype=torch.int64, device=device)
            self.seen = torch.zeros(vocab_size, dtype=torch.bool, device=device).index_fill_(0, ids, True)
        if params.presence_penalty or params.frequency_penalty:
            self.counts = torch.zeros(vocab_size, dtype=torch.float32, device=device)

    def append(self, token_id: int) -> None:
        """Take note of a token of the answer."""
        self.num_generated += 1
        if self.processors:
            self.ids.append(token_id)
        if self.seen is not None:
            self.seen[token_id] = True
        if self.counts is not None:
            self.counts[token_id] += 1.0
        if self.longest_bad_word:
            self.tail.append(token_id)
            del self.tail[: -self.longest_bad_word]


@dataclass(frozen=True, slots=True)
class _Rows:
    """What one set of requests needs, in row numbers; made once and used while the set stays the same."""

    biased: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    repeated: list[int]
    repetition: torch.Tensor
    counted: list[int]
    presence: torch.Tensor
    frequency: torch.Tensor
    bad_words: list[int]
    limited: list[int]
    allowed: torch.Tensor | None
    min_tokens: list[int]
    random: list[int]
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    processed: list[int]
    logprobs: list[int]


class Sampler:
    """Chooses tokens.

    Args:
        vocab_size: V.
        forbidden: Ids that are never chosen.
        device: Where the logits are.
    """

    def __init__(self, vocab_size: int, forbidden: Sequence[int], device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._forbidden = self._tensor([i for i in forbidden if 0 <= i < vocab_size], torch.int64)
        self._sequences: list[SequenceState] = []
        self._rows: _Rows | None = None

    def sample(self, logits: torch.Tensor, sequences: Sequence[SequenceState]) -> list[SampledToken | RequestError]:
        """Choose a token a row.

        Args:
            logits: float32 [M, V], finite or -inf; changed in place.
            sequences: M states, told of their new token.

        Returns:
            A token a row, or the error of a row whose options leave no token, or scores that are not numbers.
        """
        rows = self._rows_of(sequences)
        logprobs = torch.log_softmax(logits[rows.logprobs], dim=-1) if rows.logprobs else None
        self._penalise(logits, sequences, rows)
        self._mask(logits, sequences, rows)
        errors = self._call_processors(logits, sequences, rows)
        if len(self._forbidden):
            logits.index_fill_(1, self._forbidden, NEG_INF)
        best, chosen = _best(logits)
        hopeless = {row: value for row, value in enumerate(best.tolist()) if not isfinite(value)}
        for row, value in hopeless.items():
            errors.setdefault(row, _no_choice(value))
        if hopeless:
            logits[list(hopeless)] = 0.0
        if rows.random:
            chosen[rows.random] = self._draw(logits, sequences, rows)
        ids = chosen.tolist()
        for row, token_id in enumerate(ids):
            if not 0 <= token_id < self._vocab_size:
                errors.setdefault(row, RequestError("no token could be chosen from this request's scores"))
        tokens = [SampledToken(token_id) for token_id in ids]
        if logprobs is not None:
            counts = [sequences[row].params.logprobs or 0 for row in rows.logprobs]
            described = describe_tokens(logprobs, [ids[row] for row in rows.logprobs], counts)
            for row, token in zip(rows.logprobs, described, strict=True):
                tokens[row] = token
        for row, sequence in enumerate(sequences):
            if row not in errors:
                sequence.append(ids[row])
        return [errors.get(row, token) for row, token in enumerate(tokens)]

    # -- steps ----------------------------------------------------------------------------------

    def _penalise(self, scores: torch.Tensor, sequences: Sequence[SequenceState], rows: _Rows) -> None:
        if rows.biased is not None:
            row, column, bias = rows.biased
            scores.index_put_((row, column), bias, accumulate=True)
        if rows.repeated:
            part = scores[rows.repeated]
            seen = torch.stack([s.seen for r in rows.repeated if (s := sequences[r]).seen is not None])
            penalised = torch.where(part < 0, part * rows.repetition, part / rows.repetition)
            scores[rows.repeated] = torch.where(seen, penalised, part)
        if rows.counted:
            counts = torch.stack([s.counts for r in rows.counted if (s := sequences[r]).counts is not None])
            scores[rows.counted] -= rows.frequency * counts + rows.presence * (counts > 0)

    def _mask(self, scores: torch.Tensor, sequences: Sequence[SequenceState], rows: _Rows) -> None:
        cells: list[tuple[int, int]] = []
        for row in rows.bad_words:
            cells += [(row, token_id) for token_id in _completions(sequences[row])]
        for row in rows.min_tokens:
            params = sequences[row].params
            if sequences[row].num_generated < params.min_tokens:
                cells += [(row, token_id) for token_id in params.stop_token_ids if token_id < self._vocab_size]
        if cells:
            where = self._tensor(cells, torch.int64)
            scores[where[:, 0], where[:, 1]] = NEG_INF
        if rows.allowed is not None:
            scores[rows.limited] = scores[rows.limited].masked_fill(~rows.allowed, NEG_INF)

    def _draw(self, logits: torch.Tensor, sequences: Sequence[SequenceState], rows: _Rows) -> torch.Tensor:
        """Ids int64 [R] of the rows that choose at random."""
        scores = logits[rows.random]
        # Relative to the best, so that a low temperature makes none of them infinite.
        scores = (scores - scores.amax(dim=-1, keepdim=True)) / rows.temperature
        numbers = [uniform(s.seed, s.num_generated) for s in (sequences[row] for row in rows.random)]
        return choose(scores, rows.top_k, rows.top_p, rows.min_p, self._tensor(numbers, torch.float64))

    def _call_processors(
        self, scores: torch.Tensor, sequences: Sequence[SequenceState], rows: _Rows
    ) -> dict[int, RequestError]:
        """Let callers' own code change the rows of their requests; returns the errors of rows where it failed."""
        errors: dict[int, RequestError] = {}
        for row in rows.processed:
            sequence = sequences[row]
            ids = self._tensor([sequence.ids], torch.int64)
            try:
                for process in sequence.processors:
                    scores[row] = process(ids, scores[row : row + 1])[0]
            except BaseException as error:  # noqa: BLE001 - the border of a request's blast radius: its own code
                errors[row] = RequestError(f"a logits processor failed: {type(error).__name__}: {error}")
                errors[row].__cause__ = error
            if row not in errors and bool(scores[row].isnan().any()):
                errors[row] = RequestError("a logits processor gave a score that is not a number")
            if row in errors:
                scores[row] = 0.0
        return errors

    # -- rows -----------------------------------------------------------------------------------

    def _rows_of(self, sequences: Sequence[SequenceState]) -> _Rows:
        if self._rows is None or self._sequences != list(sequences):
            self._sequences = list(sequences)
            self._rows = self._make_rows(sequences)
        return self._rows

    def _make_rows(self, sequences: Sequence[SequenceState]) -> _Rows:
        params = [sequence.params for sequence in sequences]

        def where(test: Callable[[SamplingParams], object]) -> list[int]:
            return [row for row, p in enumerate(params) if test(p)]

        def column(numbers: Sequence[float | int | None], dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return self._tensor([_float32(x) if isinstance(x, float) else x for x in numbers], dtype).unsqueeze(-1)

        repeated = where(lambda p: p.repetition_penalty != 1.0)
        counted = where(lambda p: p.presence_penalty or p.frequency_penalty)
        limited = where(lambda p: p.allowed_token_ids is not None)
        random = where(lambda p: p.temperature)
        return _Rows(
            biased=self._biases(params),
            repeated=repeated,
            repetition=column([params[r].repetition_penalty for r in repeated]),
            counted=counted,
            presence=column([params[r].presence_penalty for r in counted]),
            frequency=column([params[r].frequency_penalty for r in counted]),
            bad_words=where(lambda p: p.bad_words),
            limited=limited,
            allowed=self._allowed([params[r].allowed_token_ids or () for r in limited]) if limited else None,
            min_tokens=where(lambda p: p.min_tokens and p.stop_token_ids),
            random=random,
            temperature=column([max(params[r].temperature or 0.0, _LEAST_TEMPERATURE) for r in random]),
            top_k=column([min(params[r].top_k or self._vocab_size, self._vocab_size) for r in random], torch.int64),
            top_p=column([params[r].top_p for r in random]),
            min_p=column([params[r].min_p for r in random]),
            logprobs=where(lambda p: p.logprobs is not None),
            processed=[row for row, sequence in enumerate(sequences) if sequence.processors],
        )

    def _biases(self, params: Sequence[SamplingParams]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        cells = [(row, token, _float32(bias)) for row, p in enumerate(params) for token, bias in p.logit_bias.items()]
        if not cells:
            return None
        rows, columns, biases = zip(*cells, strict=True)
        return self._tensor(rows, torch.int64), self._tensor(columns, torch.int64), self._tensor(biases, torch.float32)

    def _allowed(self, allowed: Sequence[Sequence[int]]) -> torch.Tensor:
        mask = torch.zeros(len(allowed), self._vocab_size, dtype=torch.bool, device=self._device)
        for row, ids in enumerate(allowed):
            mask[row, self._tensor(ids, torch.int64)] = True
        return mask

    def _tensor(self, values: object, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)


def _best(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest score of each row and where it comes first; on a CPU by numpy, ten times as fast there as torch."""
    if scores.device.type != "cpu":
        best, chosen = scores.max(dim=-1)
        return best, chosen
    chosen = torch.from_numpy(scores.numpy().argmax(axis=-1))
    return scores.gather(-1, chosen[:, None])[:, 0], chosen


def _float32(number: float) -> float:
    """The number, or the float32 nearest to it if it is beyond them: a tensor of that could not be made."""
    return min(max(number, -_LARGEST), _LARGEST)


def _no_choice(best: float) -> RequestError:
    if best == NEG_INF:
        return RequestError("no token is left: the request's options forbid every one")
    return RequestError(f"the request's options make its best score {best}")


def describe_tokens(logprobs: torch.Tensor, ids: Sequence[int], counts: Sequence[int]) -> list[SampledToken]:
    """Each id with its log-probability and those of the likeliest.

    Args:
        logprobs: [R, V]. ids: R ids; one outside of the vocabulary has log-probability -inf.
        counts: How many of the likeliest to name, a row.
    """
    size = logprobs.shape[-1]
    known = torch.tensor([[i if 0 <= i < size else 0] for i in ids], dtype=torch.int64, device=logprobs.device)
    values = logprobs.gather(-1, known).squeeze(-1).tolist()
    top_values, top_ids = logprobs.topk(min(max(counts, default=0), size), dim=-1)
    table = zip(ids, values, counts, top_ids.tolist(), top_values.tolist(), strict=True)
    return [
        SampledToken(i, value if 0 <= i < size else NEG_INF, tuple(zip(near[:count], near_values[:count], strict=True)))
        for i, value, count, near, near_values in table
    ]


def _completions(sequence: SequenceState) -> list[int]:
    """Ids that would complete a bad word now."""
    tail = sequence.tail
    found = []
    for word in sequence.bad_words:
        start = len(tail) - (len(word) - 1)
        if start >= 0 and tuple(tail[start:]) == word[:-1]:
            found.append(word[-1])
    return found
