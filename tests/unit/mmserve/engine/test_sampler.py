"""Sampling: transformers' own processors are the oracle where they do the same thing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mmserve.engine.batch import SampledToken
from mmserve.engine.choice import CANDIDATES, choose, inverse_cdf, min_p_filter, top_k_filter, top_p_filter
from mmserve.engine.defaults import resolve_sampling
from mmserve.engine.random import derive_seed, uniform
from mmserve.engine.sampler import Sampler, SequenceState
from mmserve.errors import RequestError
from mmserve.types import SamplingParams

V = 50
CPU = torch.device("cpu")


def state(
    prompt: Sequence[int] = (), bad: Sequence[tuple[int, ...]] = (), seed: int = 0, **options: Any
) -> SequenceState:
    params = resolve_sampling(SamplingParams(**options), None)
    return SequenceState(params, seed, bad, prompt, V, CPU)


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 3


def tokens(results: Sequence[SampledToken | RequestError]) -> list[int]:
    assert all(isinstance(result, SampledToken) for result in results)
    return [result.token_id for result in results if isinstance(result, SampledToken)]


def test_greedy_takes_the_likeliest() -> None:
    logits = random_logits(5)
    expected = logits.argmax(-1).tolist()
    assert tokens(Sampler(V, (), CPU).sample(logits, [state() for _ in range(5)])) == expected


def test_forbidden_ids_are_never_chosen() -> None:
    logits = torch.zeros(1, V)
    logits[0, 7] = 100.0
    logits[0, 8] = 50.0
    sampler = Sampler(V, (7, V + 3), CPU)
    assert tokens(sampler.sample(logits.clone(), [state()])) == [8]
    drawn = [tokens(sampler.sample(logits.clone(), [state(temperature=100.0, seed=n)]))[0] for n in range(100)]
    assert 7 not in drawn
    assert len(set(drawn)) > 10


@pytest.mark.parametrize("k", [1, 3, 49, 50])
def test_top_k_is_transformers(k: int) -> None:
    logits = random_logits(4).round()
    ids = torch.zeros(4, 1, dtype=torch.int64)
    assert torch.equal(top_k_filter(logits, torch.full((4, 1), k)), TopKLogitsWarper(k)(ids, logits))


@pytest.mark.parametrize("p", [0.01, 0.5, 0.9, 0.999])
def test_top_p_is_transformers(p: float) -> None:
    logits = random_logits(4)
    ids = torch.zeros(4, 1, dtype=torch.int64)
    assert torch.equal(top_p_filter(logits, torch.full((4, 1), p)), TopPLogitsWarper(p)(ids, logits))


@pytest.mark.parametrize("p", [0.001, 0.1, 1.0])
def test_min_p_is_transformers(p: float) -> None:
    logits = random_logits(4)
    ids = torch.zeros(4, 1, dtype=torch.int64)
    assert torch.equal(min_p_filter(logits, torch.full((4, 1), p)), MinPLogitsWarper(p)(ids, logits))


def test_filters_differ_by_row_and_leave_rows_without_limits_alone() -> None:
    logits = random_logits(3)
    ids = torch.zeros(1, 1, dtype=torch.int64)
    filtered = top_k_filter(logits, torch.tensor([[2], [V], [5]]))
    assert torch.equal(filtered[1], logits[1])
    assert torch.equal(filtered[2:], TopKLogitsWarper(5)(ids, logits[2:]))
    filtered = top_p_filter(logits, torch.tensor([[0.4], [1.0], [0.8]]))
    assert torch.equal(filtered[1], logits[1])
    assert torch.equal(filtered[:1], TopPLogitsWarper(0.4)(ids, logits[:1]))


def test_all_options_together_choose_from_transformers_candidates() -> None:
    """Every id of the chosen support has the probability that transformers' chain gives it."""
    prompt, bias, bad = [1, 2, 3, 40], {5: 4.0, 6: -2.0}, [(9,), (40, 11)]
    options = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.3}
    logits = random_logits(1, seed=3)
    chain = LogitsProcessorList(
        [
            SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()}),
            RepetitionPenaltyLogitsProcessor(1.3),
            NoBadWordsLogitsProcessor([list(word) for word in bad], eos_token_id=torch.tensor([0])),
            TemperatureLogitsWarper(0.8),
            TopKLogitsWarper(20),
            TopPLogitsWarper(0.9),
            MinPLogitsWarper(0.02),
        ]
    )
    probabilities = chain(torch.tensor([prompt]), logits.clone()).softmax(-1)[0]
    sampler = Sampler(V, (), CPU)
    count = 4000
    rows = [state(prompt, bad, seed, logit_bias=bias, bad_words=("x",), **options) for seed in range(count)]
    drawn = Counter(tokens(sampler.sample(logits.repeat(count, 1), rows)))
    assert set(drawn) <= set(probabilities.nonzero().flatten().tolist())
    for token_id, probability in enumerate(probabilities.tolist()):
        spread = 5 * math.sqrt(probability * (1 - probability) / count) + 1e-9
        assert abs(drawn[token_id] / count - probability) <= spread


def test_repetition_penalty_counts_prompt_and_answer() -> None:
    logits = random_logits(1)
    sequence = state([3, 4, V + 10], repetition_penalty=1.7)
    sequence.append(8)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[3, 4, 8]]), logits.clone())
    assert tokens(Sampler(V, (), CPU).sample(logits, [sequence])) == expected.argmax(-1).tolist()
    assert torch.equal(logits, expected)


def test_presence_and_frequency_count_the_answer_only() -> None:
    logits = torch.zeros(1, V)
    sequence = state([3], presence_penalty=0.5, frequency_penalty=0.25)
    for token_id in (4, 4, 5):
        sequence.append(token_id)
    Sampler(V, (), CPU).sample(logits, [sequence])
    assert logits[0, [3, 4, 5, 6]].tolist() == [0.0, -1.0, -0.75, 0.0]


def test_a_bad_word_is_never_completed_even_across_prompt_and_answer() -> None:
    logits = torch.zeros(1, V)
    logits[0, 12] = 9.0
    logits[0, 13] = 5.0
    sampler = Sampler(V, (), CPU)
    assert tokens(sampler.sample(logits.clone(), [state([10, 11], [(11, 12)], bad_words=("x",))])) == [13]
    assert tokens(sampler.sample(logits.clone(), [state([11, 10], [(11, 12)], bad_words=("x",))])) == [12]
    assert tokens(sampler.sample(logits.clone(), [state([], [(11, 12)], bad_words=("x",))])) == [12]


def test_allowed_ids_and_a_request_that_forbids_everything() -> None:
    logits = random_logits(2)
    impossible = state([], [(4,)], allowed_token_ids=(4,), bad_words=("x",))
    results = Sampler(V, (), CPU).sample(logits, [state(allowed_token_ids=(4, 5)), impossible])
    assert isinstance(results[0], SampledToken)
    assert results[0].token_id in (4, 5)
    assert isinstance(results[1], RequestError)


def test_end_tokens_wait_for_min_tokens() -> None:
    logits = torch.zeros(1, V)
    logits[0, 2] = 9.0
    sampler = Sampler(V, (), CPU)
    sequence = state(min_tokens=2, stop_token_ids=(2,))
    chosen = [tokens(sampler.sample(logits.clone(), [sequence]))[0] for _ in range(3)]
    assert 2 not in chosen[:2]
    assert chosen[2] == 2


def test_logprobs_are_the_models_own() -> None:
    logits = random_logits(3)
    expected = logits.log_softmax(-1)
    rows = [state(logprobs=2, temperature=2.0, top_k=1, logit_bias={5: 100.0}), state(), state(logprobs=0)]
    results = Sampler(V, (5,), CPU).sample(logits, rows)
    for row, result in enumerate(results):
        assert isinstance(result, SampledToken)
        if row == 1:
            assert result.logprob is None
            continue
        assert result.logprob == pytest.approx(float(expected[row, result.token_id]))
        values, ids = expected[row].topk(2)
        count = 2 if row == 0 else 0
        assert [token_id for token_id, _ in result.top] == ids.tolist()[:count]
        assert [value for _, value in result.top] == pytest.approx(values.tolist()[:count])


def test_a_seed_gives_the_same_answer_in_any_batch() -> None:
    logits = random_logits(4, seed=9)
    sampler = Sampler(V, (), CPU)

    def options(seed: int) -> SequenceState:
        return state(temperature=1.5, top_p=0.95, seed=seed)

    alone = [tokens(sampler.sample(logits[row : row + 1].clone(), [options(row)]))[0] for row in range(4)]
    together = tokens(sampler.sample(logits.clone(), [options(row) for row in range(4)]))
    mixed = sampler.sample(logits[[2, 0]].clone(), [options(2), state()])
    assert together == alone
    assert tokens(mixed)[0] == alone[2]


def test_the_same_set_of_rows_keeps_its_dynamic_options() -> None:
    """What is remembered of a set of rows must not freeze counts or min_tokens."""
    sampler = Sampler(V, (), CPU)
    sequence = state(frequency_penalty=2.0)
    logits = torch.zeros(1, V)
    logits[0, 1], logits[0, 2] = 3.0, 2.5
    assert [tokens(sampler.sample(logits.clone(), [sequence]))[0] for _ in range(3)] == [1, 2, 1]


def test_uniform_numbers_are_uniform_and_by_address() -> None:
    numbers = [uniform(seed, index) for seed in range(50) for index in range(50)]
    assert len(set(numbers)) == 2500
    assert all(0 <= number < 1 for number in numbers)
    assert abs(sum(numbers) / 2500 - 0.5) < 0.03
    assert uniform(7, 3) == uniform(7, 3)
    # Neighbouring seeds are not one sequence shifted.
    assert not {uniform(0, i) for i in range(100)} & {uniform(1, i) for i in range(100)}
    assert derive_seed(5, 0) == 5
    assert len({derive_seed(5, index) for index in range(100)}) == 100


@pytest.mark.parametrize("number", [0.0, 0.25, 0.5, 1 - 2**-53])
def test_a_draw_never_lands_on_a_removed_token(number: float) -> None:
    scores = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]])
    assert int(inverse_cdf(scores, torch.tensor([number], dtype=torch.float64))) == (1 if number < 0.5 else 3)


def test_defaults_come_from_the_model_and_resolving_twice_changes_nothing() -> None:
    config = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [2, 3], "max_new_tokens": 9}
    resolved = resolve_sampling(SamplingParams(top_p=0.5, stop_token_ids=(3, 4)), config)
    assert (resolved.temperature, resolved.top_p, resolved.max_tokens) == (0.6, 0.5, 9)
    assert resolved.stop_token_ids == (3, 4, 2)
    assert resolve_sampling(resolved, config) == resolved
    greedy = resolve_sampling(SamplingParams(ignore_eos=True), config | {"do_sample": False})
    assert (greedy.temperature, greedy.stop_token_ids) == (0.0, ())
    assert resolve_sampling(SamplingParams(), None).max_tokens == 256


@pytest.mark.parametrize("spread", [0.3, 1.0, 4.0])
def test_choosing_from_the_likeliest_few_is_choosing_from_all(spread: float) -> None:
    """Rows with every mix of filters, over flat and steep distributions; a flat one needs the whole vocabulary."""
    size, rows = 4 * CANDIDATES, 64
    generator = torch.Generator().manual_seed(5)
    scores = torch.randn(rows, size, generator=generator) * spread
    scores[0] = scores[0].round()  # ties

    def pick(*values: float) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(len(values), (rows, 1), generator=generator)]

    top_k, top_p, min_p = pick(size, 1, 40, CANDIDATES, 1500).long(), pick(1.0, 0.2, 0.9, 0.99), pick(0.0, 0.05, 1.0)
    numbers = torch.rand(rows, generator=generator, dtype=torch.float64)
    filtered = min_p_filter(top_p_filter(top_k_filter(scores, top_k), top_p), min_p)
    assert choose(scores, top_k, top_p, min_p, numbers).tolist() == inverse_cdf(filtered, numbers).tolist()
    alone = [choose(*(t[row : row + 1] for t in (scores, top_k, top_p, min_p, numbers))).item() for row in range(rows)]
    assert choose(scores, top_k, top_p, min_p, numbers).tolist() == alone


def unchecked(**options: Any) -> SequenceState:
    """Options that no request can have."""
    params = resolve_sampling(SamplingParams(), None).model_copy(update=options)
    return SequenceState(params, 0, (), [3], V, CPU)


@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": {3: math.inf}},
        {"logit_bias": {3: math.nan}, "temperature": 1.0},
        {"logit_bias": {3: 1e39}, "temperature": 0.5},
        {"logit_bias": {3: -1e39}, "temperature": 0.5},
        {"temperature": 1e-38},
        {"temperature": 1e-50, "top_k": 5, "top_p": 0.5},
        {"temperature": 1e39},
        {"temperature": 1.0, "top_k": 2**63},
        {"repetition_penalty": 1e-40},
        {"repetition_penalty": 1e-40, "temperature": 1.0, "top_k": 3},
    ],
)
def test_options_beyond_all_bounds_harm_at_most_their_own_request(options: dict[str, Any]) -> None:
    sampler = Sampler(V, (V - 1,), CPU)
    logits = random_logits(3, seed=1) * 10
    first, result, last = sampler.sample(logits.clone(), [state(), unchecked(**options), state(temperature=1.0)])
    assert isinstance(result, RequestError) or 0 <= result.token_id < V - 1
    expected = sampler.sample(logits.clone(), [state(), state(), state(temperature=1.0)])
    assert (first, last) == (expected[0], expected[2])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.inf, math.nan, -math.inf])
def test_a_row_without_a_finite_best_score_is_that_requests_error(value: float, temperature: float) -> None:
    logits = random_logits(2, seed=2)
    logits[0] = value
    failed, fine = Sampler(V, (), CPU).sample(logits, [state(temperature=temperature), state(temperature=temperature)])
    assert isinstance(failed, RequestError)
    assert isinstance(fine, SampledToken)


def test_the_lowest_temperature_takes_the_likeliest() -> None:
    logits = random_logits(4, seed=3) * 1000
    rows = [state(temperature=1e-3, seed=n) for n in range(4)]
    assert tokens(Sampler(V, (), CPU).sample(logits.clone(), rows)) == logits.argmax(-1).tolist()


def test_values_of_a_models_config_that_no_request_can_have_are_left_out() -> None:
    config = {"do_sample": True, "temperature": 1e-6, "top_k": 2**63, "repetition_penalty": 0.0, "max_new_tokens": 0}
    resolved = resolve_sampling(SamplingParams(), config)
    assert (resolved.temperature, resolved.top_k, resolved.repetition_penalty) == (0.0, 0, 1.0)
    assert resolved.max_tokens == 256
