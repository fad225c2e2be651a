"""From logits to tokens, for the whole batch at once, with every row's own options.

The order is that of transformers' `generate` (logits_process.py), so that equal options mean equal answers::

    bias -> repetition, presence, frequency penalties -> bad words -> allowed ids -> end tokens before min_tokens
         -> temperature -> top_k -> top_p -> min_p -> choice

Forbidden ids (placeholders, padded vocabulary) are never chosen. Log-probabilities that a request asks for are
those of the model itself: `log_softmax` of the logits before any of the above.

A random choice takes one number from (seed, index of the token in the answer), so it depends neither on the batch
nor on preemption: the token is where that number falls in the running sum of the probabilities, in vocabulary order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mmserve.engine.batch import SampledToken
from mmserve.engine.random import uniform
from mmserve.errors import RequestError
from mmserve.types import SamplingParams

__all__ = ["Sampler", "SequenceState"]

NEG_INF = float("-inf")


class SequenceState:
    """What the sampler remembers of one request.

    Args:
        params: Resolved options.
        seed: Of its random choices.
        bad_words: Token sequences that must not be completed.
        prompt_ids: Expanded prompt.
        vocab_size: V.
        device: Where the logits are.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        bad_words: Sequence[tuple[int, ...]],
        prompt_ids: Sequence[int],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.params = params
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
    logprobs: list[int]
    num_top: int


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
            A token a row, or the error of a row whose options leave no token.
        """
        rows = self._rows_of(sequences)
        reports = self._report_source(logits, rows)
        if len(self._forbidden):
            logits.index_fill_(1, self._forbidden, NEG_INF)
        self._penalise(logits, sequences, rows)
        self._mask(logits, sequences, rows)
        best, chosen = logits.max(dim=-1)
        if rows.random:
            chosen[rows.random] = self._draw(logits, sequences, rows)
        results: list[SampledToken | RequestError] = []
        for sequence, value, token_id in zip(sequences, best.tolist(), chosen.tolist(), strict=True):
            if value == NEG_INF:
                results.append(RequestError("no token is left: the request's options forbid every one"))
                continue
            sequence.append(token_id)
            results.append(SampledToken(token_id))
        if reports is not None:
            self._report(results, sequences, rows, reports)
        return results

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
        scores = logits[rows.random] / rows.temperature
        scores = top_k_filter(scores, rows.top_k)
        scores = top_p_filter(scores, rows.top_p)
        scores = min_p_filter(scores, rows.min_p)
        numbers = [uniform(s.seed, s.num_generated) for s in (sequences[row] for row in rows.random)]
        return inverse_cdf(scores, self._tensor(numbers, torch.float64))

    # -- reports --------------------------------------------------------------------------------

    def _report_source(self, logits: torch.Tensor, rows: _Rows) -> torch.Tensor | None:
        """Log-probabilities [L, V] of the rows that report them, from untouched logits."""
        return torch.log_softmax(logits[rows.logprobs], dim=-1) if rows.logprobs else None

    def _report(
        self,
        results: list[SampledToken | RequestError],
        sequences: Sequence[SequenceState],
        rows: _Rows,
        logprobs: torch.Tensor,
    ) -> None:
        values, ids = logprobs.topk(min(rows.num_top, self._vocab_size), dim=-1)
        table = zip(rows.logprobs, logprobs, ids.tolist(), values.tolist(), strict=True)
        for row, report, top_ids, top_values in table:
            result = results[row]
            if isinstance(result, SampledToken):
                count = sequences[row].params.logprobs or 0
                top = tuple(zip(top_ids[:count], top_values[:count], strict=True))
                results[row] = SampledToken(result.token_id, float(report[result.token_id]), top)

    # -- rows -----------------------------------------------------------------------------------

    def _rows_of(self, sequences: Sequence[SequenceState]) -> _Rows:
        if self._rows is None or self._sequences != list(sequences):
            self._sequences = list(sequences)
            self._rows = self._make_rows([s.params for s in sequences])
        return self._rows

    def _make_rows(self, params: Sequence[SamplingParams]) -> _Rows:
        def where(test: object) -> list[int]:
            return [row for row, p in enumerate(params) if test(p)]  # type: ignore[operator]

        def column(numbers: Sequence[float | int | None], dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return self._tensor(numbers, dtype).unsqueeze(-1)

        repeated = where(lambda p: p.repetition_penalty != 1.0)
        counted = where(lambda p: p.presence_penalty or p.frequency_penalty)
        limited = where(lambda p: p.allowed_token_ids is not None)
        random = where(lambda p: p.temperature > 0)
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
            temperature=column([params[r].temperature for r in random]),
            top_k=column([params[r].top_k or self._vocab_size for r in random], torch.int64),
            top_p=column([params[r].top_p for r in random]),
            min_p=column([params[r].min_p for r in random]),
            logprobs=where(lambda p: p.logprobs is not None),
            num_top=max((p.logprobs or 0 for p in params), default=0),
        )

    def _biases(self, params: Sequence[SamplingParams]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        cells = [(row, token, bias) for row, p in enumerate(params) for token, bias in p.logit_bias.items()]
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


def _completions(sequence: SequenceState) -> list[int]:
    """Ids that would complete a bad word now."""
    tail = sequence.tail
    found = []
    for word in sequence.bad_words:
        start = len(tail) - (len(word) - 1)
        if start >= 0 and tuple(tail[start:]) == word[:-1]:
            found.append(word[-1])
    return found


def top_k_filter(scores: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Remove what is less likely than the k-th likeliest (transformers' TopKLogitsWarper; ties stay).

    Args:
        scores: [R, V]. top_k: int64 [R, 1], V for no limit.
    """
    size = scores.shape[-1]
    largest = int(top_k.clamp(max=size).where(top_k < size, 0).max())
    if largest == 0:
        return scores
    values = scores.topk(largest, dim=-1).values
    threshold = values.gather(-1, top_k.clamp(max=largest) - 1)
    return scores.masked_fill((scores < threshold) & (top_k < size), NEG_INF)


def top_p_filter(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep the likeliest that hold `top_p` [R, 1] of the probability (transformers' TopPLogitsWarper)."""
    if bool((top_p >= 1.0).all()):
        return scores
    ascending, order = scores.sort(dim=-1)
    remove = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1.0 - top_p
    remove &= top_p < 1.0
    remove[:, -1] = False
    return scores.masked_fill(remove.scatter(1, order, remove), NEG_INF)


def min_p_filter(scores: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Remove what is less likely than `min_p` [R, 1] times the likeliest (transformers' MinPLogitsWarper)."""
    if not bool(min_p.any()):
        return scores
    probabilities = scores.softmax(dim=-1)
    threshold = min_p * probabilities.amax(dim=-1, keepdim=True)
    return scores.masked_fill(probabilities < threshold, NEG_INF)


def inverse_cdf(scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The id [R] in whose part of the running sum of softmax(scores [R, V]) each number [R] of [0, 1) falls."""
    sums = scores.softmax(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    # The sum's last entry is 1 but for rounding; a target at or beyond it would point behind the last token.
    total = sums[:, -1]
    target = torch.minimum(numbers * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(sums, target.unsqueeze(-1), right=True).squeeze(-1)
