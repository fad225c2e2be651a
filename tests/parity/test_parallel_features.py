"""Over several ranks every feature of the engine does what it does in one process: same ids, same numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fixtures.tiny_models.conformance import TOLERANCE
from fixtures.tiny_models.families import FAMILIES
from fixtures.tiny_models.family import build, make_prompt
from fixtures.tiny_models.id_tokenizer import Numbers
from fixtures.tiny_models.ranks import BLOCK_SIZE, parallel_engine, workers
from mmserve.config import EngineConfig
from mmserve.engine.core import Engine
from mmserve.engine.trial import memory_in_use
from mmserve.errors import InvalidRequestError, ModelOutputError, RequestAborted
from mmserve.model import load_model
from mmserve.parallel.layout import Layout
from mmserve.parallel.workers.crew import Member
from mmserve.types import GenerationOutput, SamplingParams
from processors.types import ProcessedPrompt

FAMILY = FAMILIES["qwen3_vl"]  # DeepStack rows, M-RoPE, its tower whole on each rank
LAYOUTS = {"2x1": Layout(2, 1), "1x2": Layout(1, 2), "2x2": Layout(2, 2)}
TIGHT = {"num_blocks": 6, "max_num_batched_tokens": 9, "max_num_seqs": 4, "max_images_per_step": 2}
"""Prompts go in chunks, and four answers do not fit at once."""
WAIT = 300
GREEDY = SamplingParams(max_tokens=6)


class Pair(SimpleNamespace):
    """One engine over ranks and one in this process, with what both were asked."""

    def both(self, prompts: list[ProcessedPrompt], sampling: SamplingParams = GREEDY) -> list[GenerationOutput]:
        """All prompts at once over ranks, and one by one alone: the same; what came over ranks."""
        handles = [self.ranks.submit(prompt, sampling) for prompt in prompts]
        found = [handle.result(WAIT) for handle in handles]
        for answer, prompt in zip(found, prompts, strict=True):
            assert_same(answer, self.alone.submit(prompt, sampling).result(WAIT))
        self.ranks.check_integrity()
        return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(FAMILY, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def members() -> Iterator[list[Member]]:
    with workers(3) as started:
        yield started


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[Engine]:
    model = load_model(folder, dtype="float32", device="cpu", block_size=BLOCK_SIZE)
    config = EngineConfig(block_size=BLOCK_SIZE, num_blocks=64, enable_prefix_caching=False, encoder_cache_memory=0)
    engine = Engine(model, Numbers(), config, identity="alone")
    yield engine
    engine.close()


@pytest.fixture(scope="module", params=LAYOUTS)
def pair(request: Any, folder: Path, alone: Engine, members: list[Member]) -> Iterator[Pair]:
    layout = LAYOUTS[request.param]
    with ExitStack() as stack:
        ranks, model = stack.enter_context(parallel_engine(folder, layout, members, **TIGHT))
        yield Pair(ranks=ranks, alone=alone, layout=layout, model=model)


def assert_same(found: GenerationOutput, expected: GenerationOutput) -> None:
    for answer, wanted in zip((found, *found.others), (expected, *expected.others), strict=True):
        assert answer.token_ids == wanted.token_ids
        assert answer.text == wanted.text
        assert answer.finish_reason == wanted.finish_reason
        for name in ("logprobs", "prompt_logprobs"):
            entries, others = getattr(answer, name), getattr(wanted, name)
            assert (entries is None) == (others is None)
            for entry, other in zip(entries or (), others or (), strict=True):
                assert_close(entry, other)


def assert_close(entry: Any, other: Any) -> None:
    assert (entry is None) == (other is None)
    if entry is None:
        return
    assert [one.token_id for one in entry.top] == [one.token_id for one in other.top]
    for one, two in zip((entry.chosen, *entry.top), (other.chosen, *other.top), strict=True):
        assert one.token_id == two.token_id
        assert abs(one.logprob - two.logprob) < TOLERANCE


def prompts(count: int, seed: int) -> list[ProcessedPrompt]:
    """Prompts with one picture each, all different, longer than a step."""
    return [make_prompt(FAMILY, [3, (100 * seed + i, i % 2), 12 + i], 100 * seed + i) for i in range(count)]


def test_chunks_of_prompts_with_pictures(pair: Pair) -> None:
    asked = prompts(3, 1)
    assert all(len(prompt.token_ids) > TIGHT["max_num_batched_tokens"] for prompt in asked)
    pair.both(asked)


def test_a_prefix_and_a_picture_that_are_known(pair: Pair) -> None:
    first = make_prompt(FAMILY, [20, (7, 0), 20], 7)
    assert pair.both([first])[0].usage.cached_tokens == 0
    assert pair.both([first])[0].usage.cached_tokens >= BLOCK_SIZE
    encoded = pair.ranks.stats()["images_encoded"]
    (other,) = pair.both([make_prompt(FAMILY, [4, (7, 0), 3], 8)])
    assert other.usage.cached_tokens == 0
    assert pair.ranks.stats()["images_encoded"] == encoded


def test_ranks_of_the_first_stage_encode_different_pictures(pair: Pair) -> None:
    if pair.layout.tensor == 1:
        pytest.skip("the tower is on one rank")
    encoder = pair.model._encoder
    own, total = encoder.num_encoded, pair.ranks.stats()["images_encoded"]
    pair.both([make_prompt(FAMILY, [(20, 0), 1, (21, 0), 2, (22, 0), 1, (23, 0), 2], 9)])
    assert pair.ranks.stats()["images_encoded"] - total == 4
    assert 0 < encoder.num_encoded - own < 4


def test_answers_that_lose_their_blocks_and_come_back(pair: Pair) -> None:
    before = pair.ranks.stats()["preemptions"]
    pair.both(prompts(4, 2), SamplingParams(max_tokens=30, ignore_eos=True))
    assert pair.ranks.stats()["preemptions"] > before


def test_seeds_and_further_answers(pair: Pair) -> None:
    wild = {"temperature": 1.0, "top_p": 0.95, "ignore_eos": True}
    pair.both(prompts(2, 3), SamplingParams(max_tokens=8, seed=5, **wild))
    (answer,) = pair.both(prompts(1, 4), SamplingParams(max_tokens=8, n=3, seed=6, **wild))
    assert len({one.token_ids for one in (answer, *answer.others)}) > 1


def test_log_probabilities_of_answer_and_prompt(pair: Pair) -> None:
    pair.both(prompts(2, 5), SamplingParams(max_tokens=4, logprobs=3, prompt_logprobs=2))


def test_stop_strings_and_penalties(pair: Pair) -> None:
    (prompt,) = prompts(1, 6)
    words = pair.alone.submit(prompt, SamplingParams(max_tokens=6, ignore_eos=True)).result(WAIT).text.split()
    (answer,) = pair.both([prompt], SamplingParams(max_tokens=6, ignore_eos=True, stop=(f" {words[2]}",)))
    assert answer.finish_reason == "stop"
    pair.both([prompt], SamplingParams(max_tokens=6, repetition_penalty=1.4, presence_penalty=0.5))


def test_a_caller_s_processor_runs_where_tokens_are_chosen_and_nowhere_else(pair: Pair) -> None:
    (prompt,) = prompts(1, 7)
    seen: list[int] = []

    def only_odd(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(ids.shape[1])
        scores[:, ::2] = float("-inf")
        return scores

    if pair.layout.pipeline > 1:
        with pytest.raises(InvalidRequestError, match="use tensor_parallel alone"):
            pair.ranks.submit(prompt, GREEDY, logits_processors=[only_odd])
        return
    found = pair.ranks.submit(prompt, GREEDY, logits_processors=[only_odd]).result(WAIT)
    assert seen == [len(prompt.token_ids) + i for i in range(len(found.token_ids))]
    assert_same(found, pair.alone.submit(prompt, GREEDY, logits_processors=[only_odd]).result(WAIT))


def test_a_broken_picture_fails_its_own_request(pair: Pair) -> None:
    good, (bad,) = prompts(2, 8), prompts(1, 9)
    pixels = {name: t * float("nan") if t.is_floating_point() else t for name, t in bad.images[0].tensors.items()}
    bad = replace(bad, images=(replace(bad.images[0], key="broken", tensors=pixels),))
    failing = pair.ranks.submit(bad, GREEDY)
    pair.both(good)
    with pytest.raises(ModelOutputError, match="not finite"):
        failing.result(WAIT)
    pair.both(good)


def test_requests_given_up_in_the_middle_leave_nothing_behind(pair: Pair) -> None:
    """Alone and with further answers, before and while they talk; their ids are used again at once."""
    asked, long = prompts(3, 10), SamplingParams(max_tokens=40, ignore_eos=True)
    for round_ in range(3):
        talking = pair.ranks.submit(asked[0], long, request_id="same")
        several = pair.ranks.submit(asked[1], long.model_copy(update={"n": 2}), request_id="several")
        kept = pair.ranks.submit(asked[2], GREEDY)
        words = iter(talking)  # letting go of it would give the request up
        for _ in range(round_):
            next(words)
        talking.abort()
        several.abort()
        for handle in (talking, several):
            with pytest.raises(RequestAborted):
                handle.result(WAIT)
        ids = ("same", "several")
        again = [pair.ranks.submit(prompt, GREEDY, request_id=i) for prompt, i in zip(asked, ids, strict=False)]
        for handle, prompt in zip((*again, kept), asked, strict=True):
            assert_same(handle.result(WAIT), pair.alone.submit(prompt, GREEDY).result(WAIT))
    pair.ranks.check_integrity()


@pytest.mark.parametrize("layout", [Layout(2, 1), Layout(1, 2)], ids=["2x1", "1x2"])
def test_each_rank_keeps_to_its_budget(layout: Layout, folder: Path, alone: Engine) -> None:
    """All try the worst step at once, each on its own part; the blocks are those of the rank with the least room.

    On workers of its own: the module's may still be `pair`'s.
    """
    budget = memory_in_use(torch.device("cpu")) + 2**29
    caches = {"encoder_cache_memory": 2**20, "processor_cache_memory": 2**20}
    options = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "memory_budget": budget, **caches}
    with parallel_engine(folder, layout, None, **options) as (engine, _):
        about = engine.describe()
        memory = about["memory"]
        assert memory["budget"] == budget
        assert re.search(r"the same for each rank, and on rank [01] it leaves the fewest blocks", memory["rule"])
        assert 0 < memory["kv_cache"] < budget - memory["loaded"]
        (worker,) = about["workers"]
        assert 0 < worker["cache_bytes"] <= memory["kv_cache"]
        (prompt,) = prompts(1, 11)
        assert_same(engine.submit(prompt, GREEDY).result(WAIT), alone.submit(prompt, GREEDY).result(WAIT))
