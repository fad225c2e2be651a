"""The whole engine on the mock model: each request as if it were alone, and nobody left waiting."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from mmserve.config import EngineConfig
from mmserve.engine.core import Engine, RequestHandle
from mmserve.engine.random import derive_seed
from mmserve.errors import (
    CapacityError,
    ConfigError,
    DeadlineExceeded,
    EngineDeadError,
    InvalidRequestError,
    ModelOutputError,
    Overloaded,
    PipelineClosedError,
    RequestAborted,
    RequestError,
)
from mmserve.testing import ByteTokenizer, MockModel, mock_image, mock_prompt
from mmserve.types import GenerationOutput, SamplingParams
from processors.types import ProcessedPrompt

WAIT = 300
"""Seconds after which a test gives up; nothing here takes one."""


@contextmanager
def running(model: MockModel | None = None, **options: Any) -> Iterator[Engine]:
    config = EngineConfig(**{"block_size": 4, "num_blocks": 64, "max_num_batched_tokens": 16} | options)
    engine = Engine(model or MockModel(), ByteTokenizer(), config, identity="mock")
    try:
        yield engine
    finally:
        engine.close()


def ask(engine: Engine, prompt: ProcessedPrompt, **options: Any) -> GenerationOutput:
    return engine.submit(prompt, SamplingParams(**{"max_tokens": 8} | options)).result(WAIT)


def settle(engine: Engine) -> None:
    """Wait until the engine has nothing to do, end it, and check that it held nothing."""
    deadline = time.monotonic() + WAIT
    while any(engine.stats()[name] for name in ("running", "waiting")) or engine._runner.num_requests:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    kept = engine._runner.image_keys
    engine.close()  # its thread has ended, so nothing changes while we look
    engine.check_integrity()
    assert engine.stats()["blocks_held"] == 0
    assert engine._scheduler.images.ledger.held_bytes == 0
    assert engine._runner.num_requests == 0
    assert kept == set(engine._scheduler.images.ledger._entries)
    assert not engine._runner.image_keys


def test_an_answer_is_complete() -> None:
    with running() as engine:
        prompt = mock_prompt([65] * 20, [mock_image(2, 6), mock_image(8, 4, 1)])
        output = ask(engine, prompt, logprobs=2)
        assert len(output.token_ids) == 8
        assert output.text == ByteTokenizer().decode(output.token_ids, skip_special_tokens=True)
        assert output.finish_reason == "length"
        assert output.usage.model_dump() == {
            "prompt_tokens": 20,
            "image_tokens": 10,
            "cached_tokens": 0,
            "completion_tokens": 8,
        }
        assert output.logprobs is not None
        assert [entry.chosen.token_id for entry in output.logprobs] == list(output.token_ids)
        assert all(len(entry.top) == 2 for entry in output.logprobs)
        assert output.metrics.total >= output.metrics.first_token >= 0
        assert output.metrics.per_token is not None
        assert output.metrics.encode > 0
        assert ask(engine, prompt).usage.cached_tokens == 16
        settle(engine)


def test_deltas_add_up_and_the_last_one_has_the_output() -> None:
    script = list("Ein Stück 👩‍👩‍👧 漢字 END and more".encode())
    with running(MockModel(script=script)) as engine:
        handle = engine.submit(mock_prompt([65] * 9), SamplingParams(max_tokens=50, stop=("END",)))
        deltas = list(handle)
        output = handle.result(WAIT)
        assert output.text == "Ein Stück 👩‍👩‍👧 漢字 "
        assert output.finish_reason == "stop"
        assert "".join(delta.text for delta in deltas) == output.text
        assert sum((delta.token_ids for delta in deltas), ()) == output.token_ids
        assert [delta.output for delta in deltas] == [None] * (len(deltas) - 1) + [output]


def test_an_end_token_ends_the_answer_unless_ignored() -> None:
    model = MockModel(script=[72, 105, 257])
    config = EngineConfig(block_size=4, num_blocks=64)
    engine = Engine(model, ByteTokenizer(), config, identity="m", generation_config={"eos_token_id": 257})
    try:
        output = ask(engine, mock_prompt([65, 66]))
        assert (output.text, output.token_ids, output.finish_reason) == ("Hi", (72, 105, 257), "stop")
        ignored = ask(engine, mock_prompt([65, 66]), ignore_eos=True)
        assert ignored.token_ids[:3] == (72, 105, 257)
        assert len(ignored.token_ids) == 8
        assert 257 not in ask(engine, mock_prompt([65, 66]), min_tokens=4).token_ids[:4]
    finally:
        engine.close()


@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize("budget", [1, 5, 16, 64])
def test_tokens_do_not_depend_on_the_chunk_size(budget: int, both_ways: bool) -> None:
    prompt = mock_prompt([65] * 30, [mock_image(3, 10, gaps=4), mock_image(13, 9, 1)])
    with running(MockModel(both_ways=both_ways), max_num_batched_tokens=64) as engine:
        expected = ask(engine, prompt)
    with running(MockModel(both_ways=both_ways), max_num_batched_tokens=budget) as engine:
        assert ask(engine, prompt).token_ids == expected.token_ids
        # and hot, where the hit ends inside or behind the image
        assert ask(engine, prompt).token_ids == expected.token_ids


def test_each_image_is_encoded_once_and_another_one_is_another_answer() -> None:
    model = MockModel()
    with running(model, max_num_batched_tokens=8) as engine:
        prompts = [mock_prompt([65] * 24, [mock_image(2, 18, seed)]) for seed in (1, 2, 1)]
        first, second, third = (ask(engine, prompt).token_ids for prompt in prompts)
        assert first != second
        assert first == third
        assert len(model.encoded) == 2
        # The same picture elsewhere in the prompt: no prefix hit, but no encoding either.
        ask(engine, mock_prompt([65] * 24, [mock_image(3, 18, 1)]))
        assert len(model.encoded) == 2


def test_a_preempted_request_says_nothing_twice() -> None:
    with running(num_blocks=8, max_num_seqs=4) as engine:
        prompts = [mock_prompt([65 + n] * 10, [mock_image(1, 6, n)]) for n in range(4)]
        expected = [ask(engine, prompt, max_tokens=16) for prompt in prompts]
        handles = [engine.submit(prompt, SamplingParams(max_tokens=16)) for prompt in prompts]
        for handle, alone in zip(handles, expected, strict=True):
            assert "".join(delta.text for delta in handle) == alone.text
            assert handle.result(WAIT).token_ids == alone.token_ids
        assert engine.stats()["preemptions"] > 0
        settle(engine)


@pytest.mark.parametrize("num_blocks", [200, 14])
@pytest.mark.parametrize("length", [8, 10])
def test_n_answers_are_those_of_n_requests_with_seeds_of_their_own(length: int, num_blocks: int) -> None:
    """The prompt ends inside a block (copied on write) or on its border; with few blocks some are preempted."""
    prompt = mock_prompt([65] * length, [mock_image(1, 5)])
    options: dict[str, Any] = {"temperature": 1.0, "max_tokens": 20}
    with running(num_blocks=num_blocks) as engine:
        alone = [ask(engine, prompt, seed=derive_seed(7, index), **options).token_ids for index in range(4)]
        assert len(set(alone)) == 4
        computed = engine.stats()["computed_tokens"]
        handle = engine.submit(prompt, SamplingParams(n=4, seed=7, **options))
        text = "".join(delta.text for delta in handle)
        output = handle.result(WAIT)
        assert [output.token_ids, *(other.token_ids for other in output.others)] == alone
        assert text == output.text
        assert all(other.usage == output.usage for other in output.others)
        if num_blocks == 200:
            assert engine.stats()["preemptions"] == 0
            cached = output.usage.cached_tokens
            assert engine.stats()["computed_tokens"] - computed == length - cached + 4 * 19
        else:
            assert engine.stats()["preemptions"] > 0
        settle(engine)


def test_n_answers_fail_and_are_aborted_together() -> None:
    with running(MockModel(nan_after={90}), max_num_seqs=4) as engine:
        with pytest.raises(CapacityError, match=r"5 answers at once.*max_num_seqs is 4"):
            engine.submit(mock_prompt([65]), SamplingParams(n=5))
        with pytest.raises(ModelOutputError):
            engine.submit(mock_prompt([90]), SamplingParams(n=3)).result(WAIT)
        # One answer meets id 90 on its way; all of them fail with it.
        with pytest.raises(ModelOutputError):
            ask(engine, mock_prompt([65] * 6), n=4, seed=1, temperature=3.0, max_tokens=60, logit_bias={90: 2.0})
        handle = engine.submit(mock_prompt([66] * 6), SamplingParams(n=4, max_tokens=100, ignore_eos=True))
        next(iter_without_abort(handle))
        handle.abort()
        with pytest.raises(RequestAborted):
            handle.result(WAIT)
        settle(engine)


@pytest.mark.parametrize("budget", [3, 16, 64])
def test_prompt_logprobs_are_aligned_with_the_expanded_prompt(budget: int) -> None:
    """What an answer's tokens had as logprobs, they have as prompt tokens of the next turn; hot cache or not."""
    image = mock_image(3, 6, gaps=3)
    with running(max_num_batched_tokens=budget, num_blocks=128) as engine:
        first = ask(engine, mock_prompt([65] * 14, [image]), logprobs=2)
        prompt = mock_prompt([*[65] * 14, *first.token_ids], [image])
        output = ask(engine, prompt, prompt_logprobs=2)
        assert output.usage.cached_tokens == 0
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == 22
        assert output.prompt_logprobs[14:] == first.logprobs
        missing = [position for position, entry in enumerate(output.prompt_logprobs) if entry is None]
        assert missing == [0, *image.range.embed_positions()]
        assert [e.chosen.token_id for e in output.prompt_logprobs[9:14] if e is not None] == [65] * 5
        # It neither reads the cache nor spoils it for others.
        assert ask(engine, prompt).usage.cached_tokens == 20
        assert ask(engine, mock_prompt([65]), prompt_logprobs=0).prompt_logprobs == (None,)
        settle(engine)


def test_prompt_logprobs_survive_preemption_and_mix_with_others() -> None:
    prompts = [mock_prompt([65 + n] * 10, [mock_image(1, 4, n)]) for n in range(4)]
    with running(num_blocks=8, max_num_seqs=4) as engine:
        options = [{"prompt_logprobs": 1}, {}, {"prompt_logprobs": 0, "logprobs": 1}, {"prompt_logprobs": 3, "n": 2}]
        alone = [ask(engine, p, max_tokens=16, **o) for p, o in zip(prompts, options, strict=True)]
        handles = [engine.submit(p, SamplingParams(max_tokens=16, **o)) for p, o in zip(prompts, options, strict=True)]
        for expected, handle in zip(alone, handles, strict=True):
            output = handle.result(WAIT)
            assert output.token_ids == expected.token_ids
            assert output.prompt_logprobs == expected.prompt_logprobs
        assert engine.stats()["preemptions"] > 0
        settle(engine)


class Vocabulary(ByteTokenizer):
    def get_vocab(self) -> dict[str, int]:
        return {f"{token_id}": token_id for token_id in range(len(self))}


class Broken(ByteTokenizer):
    """Raises for the letter Z, whatever is asked about it."""

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        if 90 in ids and len(ids) > 1:
            raise ValueError("no Z, please")
        return super().decode(ids, skip_special_tokens)


def test_rows_of_the_head_that_no_token_has_are_harmless_and_if_known_never_sampled() -> None:
    config = EngineConfig(block_size=4, num_blocks=64)
    loud = {"logit_bias": {280: 99.0}, "logprobs": 1, "max_tokens": 3}
    for tokenizer in (ByteTokenizer(), Vocabulary()):
        engine = Engine(MockModel(vocab_size=300), tokenizer, config, identity="m")
        try:
            output = ask(engine, mock_prompt([65] * 3), **loud)
            assert (280 in output.token_ids) == (type(tokenizer) is ByteTokenizer)
            if type(tokenizer) is Vocabulary:
                with pytest.raises(InvalidRequestError, match="rows of the head without a token"):
                    ask(engine, mock_prompt([65]), allowed_token_ids=(280, 258))
            assert ask(engine, mock_prompt([65] * 3))
        finally:
            engine.close()


def test_a_tokenizer_that_raises_fails_that_request_alone() -> None:
    engine = Engine(MockModel(), Broken(), EngineConfig(block_size=4, num_blocks=64), identity="m")
    try:
        with pytest.raises(RequestError, match="could not be made text: ValueError: no Z"):
            ask(engine, mock_prompt([65] * 3), logit_bias={90: 99.0})
        assert ask(engine, mock_prompt([65] * 3), logit_bias={91: 99.0}).text == "[" * 8
        settle(engine)
    finally:
        engine.close()


def test_callers_own_logits_processors() -> None:
    """As transformers calls them: with all ids so far, and before temperature."""
    seen: list[list[int]] = []

    def only_next_letter(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(ids[0].tolist())
        masked = torch.full_like(scores, float("-inf"))
        masked[0, int(ids[0, -1]) + 1] = 0.0
        return masked

    def broken(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise ValueError("boom")

    def leaving(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise SystemExit(3)

    sampling = SamplingParams(max_tokens=3, temperature=1.0)
    with running() as engine:
        good = engine.submit(mock_prompt([64, 65]), sampling, logits_processors=[only_next_letter])
        bad = engine.submit(mock_prompt([64, 65]), sampling, logits_processors=[broken])
        exiting = engine.submit(mock_prompt([64, 65]), sampling, logits_processors=[leaving])
        nothing = engine.submit(mock_prompt([64, 65]), sampling, logits_processors=[lambda _, s: s * torch.nan])
        assert good.result(WAIT).text == "BCD"
        assert seen == [[64, 65], [64, 65, 66], [64, 65, 66, 67]]
        with pytest.raises(RequestError, match="a logits processor failed: ValueError: boom"):
            bad.result(WAIT)
        with pytest.raises(RequestError, match="a logits processor failed: SystemExit: 3"):
            exiting.result(WAIT)
        with pytest.raises(RequestError, match="not a number"):
            nothing.result(WAIT)
        settle(engine)


class Recorded(ByteTokenizer):
    """Remembers which threads used this copy of it."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[str] = set()

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        self.threads.add(threading.current_thread().name)
        return super().encode(text, add_special_tokens)

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        self.threads.add(threading.current_thread().name)
        return super().decode(token_ids, skip_special_tokens)


def test_bad_words_are_not_encoded_with_what_the_engines_thread_decodes_with() -> None:
    engine = Engine(MockModel(), Recorded(), EngineConfig(block_size=4, num_blocks=64), identity="m")
    try:
        ask(engine, mock_prompt([65]), bad_words=("A",))
        assert engine._decoder._tokenizer.threads == {"mmserve-engine"}  # type: ignore[attr-defined]
    finally:
        engine.close()


def test_a_stop_string_that_only_the_end_settles_ends_the_answer() -> None:
    with running(MockModel(script=[65, 66, 0xC3])) as engine:
        output = ask(engine, mock_prompt([70]), max_tokens=3, stop=("B\ufffd",))
        assert (output.text, output.finish_reason) == ("A", "stop")


def test_end_ids_of_the_model_that_its_head_can_not_say_are_left_out() -> None:
    config = EngineConfig(block_size=4, num_blocks=64)
    engine = Engine(MockModel(), ByteTokenizer(), config, identity="m", generation_config={"eos_token_id": [257, 900]})
    try:
        assert ask(engine, mock_prompt([65]), min_tokens=2)
        with pytest.raises(InvalidRequestError, match="stop_token_ids names id 900"):
            ask(engine, mock_prompt([65]), stop_token_ids=(900,))
    finally:
        engine.close()


def test_all_answers_share_the_report_on_the_prompt() -> None:
    with running() as engine:
        output = ask(engine, mock_prompt([65] * 6), n=3, prompt_logprobs=1)
        assert output.prompt_logprobs is not None
        assert any(output.prompt_logprobs)
        assert all(other.prompt_logprobs == output.prompt_logprobs for other in output.others)


def test_the_queue_is_what_came_before_the_first_step() -> None:
    """Not the step itself; the wait for a worker that makes the prompt is part of it."""
    with running(MockModel(forward_seconds=0.05)) as engine:
        metrics = ask(engine, mock_prompt([65]), max_tokens=1).metrics
        assert metrics.queue <= metrics.first_token - 0.05
        called = time.monotonic() - 50
        handle = engine.submit(mock_prompt([65]), SamplingParams(max_tokens=1), arrival=called, preprocess=20)
        metrics = handle.result(WAIT).metrics
        assert metrics.preprocess == 20
        assert 30 <= metrics.queue <= metrics.first_token - 20 - 0.05


def test_an_id_that_could_be_a_further_answers_is_refused() -> None:
    with running() as engine, pytest.raises(InvalidRequestError, match="no '#'"):
        engine.submit(mock_prompt([65]), request_id="mine#1")


# -- failure --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (MockModel(short_images={"image-7-5-0"}), "takes 5 feature rows, but the vision tower gave 4"),
        (MockModel(nan_after={90}), "not finite"),
    ],
)
def test_one_requests_failure_is_that_requests_failure(model: MockModel, reason: str) -> None:
    good = [mock_prompt([65 + n] * 12, [mock_image(1, 5, n)]) for n in range(3)]
    bad = mock_prompt([65] * 11 + [90], [mock_image(1, 5, 7)])
    with running(model) as engine:
        expected = [ask(engine, prompt).token_ids for prompt in good]
        handles = [engine.submit(prompt, SamplingParams(max_tokens=8)) for prompt in (good[0], bad, *good[1:])]
        with pytest.raises(ModelOutputError, match=reason):
            handles.pop(1).result(WAIT)
        assert [handle.result(WAIT).token_ids for handle in handles] == expected
        settle(engine)


class RaisingEncoder(MockModel):
    """Breaks its promise: one image's error is raised for the whole batch."""

    def encode(self, images: Any) -> Any:
        if any(image.key == "image-7-5-0" for image in images):
            raise ValueError("boom")
        return super().encode(images)


def test_an_encoder_that_raises_harms_only_the_culprit() -> None:
    with running(RaisingEncoder(), max_num_batched_tokens=64) as engine:
        prompts = [mock_prompt([65] * 12, [mock_image(1, 5, n)]) for n in (1, 7, 2)]
        handles = [engine.submit(prompt) for prompt in prompts]
        with pytest.raises(ModelOutputError, match="image 1 could not be encoded: ValueError: boom"):
            handles[1].result(WAIT)
        assert handles[0].result(WAIT).token_ids != handles[2].result(WAIT).token_ids
        settle(engine)


def test_a_dead_engine_tells_every_waiter_and_every_later_call() -> None:
    with running(MockModel(dies_on={90}, forward_seconds=0.002), max_num_seqs=2) as engine:
        handles = [engine.submit(mock_prompt([65] * 5), SamplingParams(max_tokens=100)) for _ in range(3)]
        handles.append(engine.submit(mock_prompt([90]), priority=-1))
        for handle in handles:
            with pytest.raises(EngineDeadError, match="told to die") as caught:
                handle.result(WAIT)
            assert isinstance(caught.value.__cause__, RuntimeError)
        with pytest.raises(EngineDeadError, match="told to die"):
            engine.submit(mock_prompt([65]))


def test_close_tells_waiters_and_leaves_no_thread() -> None:
    with running(MockModel(forward_seconds=0.002)) as engine:
        handle = engine.submit(mock_prompt([65] * 5), SamplingParams(max_tokens=200))
        next(iter(handle))
        engine.close()
        with pytest.raises(PipelineClosedError):
            handle.result(WAIT)
        with pytest.raises(PipelineClosedError):
            engine.submit(mock_prompt([65]))
        assert not any(thread.name == "mmserve-engine" and thread.is_alive() for thread in threading.enumerate())


@pytest.mark.parametrize("tokens_before", [0, 1, 3])
def test_leaving_a_stream_early_aborts_and_frees(tokens_before: int) -> None:
    with running(MockModel(forward_seconds=0.001), max_num_seqs=1) as engine:
        other = engine.submit(mock_prompt([66] * 5), SamplingParams(max_tokens=5))
        handle = engine.submit(mock_prompt([65] * 30, [mock_image(1, 20)]), SamplingParams(max_tokens=90))
        stream = iter(handle)
        for _ in range(tokens_before):
            next(stream)
        if tokens_before:
            stream.close()  # type: ignore[attr-defined]
        else:
            handle.abort()
        with pytest.raises(RequestAborted):
            handle.result(WAIT)
        assert len(other.result(WAIT).token_ids) == 5
        settle(engine)


def test_a_fork_that_fails_as_it_begins_fails_its_request() -> None:
    """Even if the first answer ends with that very token."""
    for max_tokens in (1, 4):
        calls = iter(range(100))

        def second_fails(_: torch.Tensor, scores: torch.Tensor, calls: Iterator[int] = calls) -> torch.Tensor:
            if next(calls) == 1:
                raise ValueError("boom")
            return scores

        with running() as engine:
            sampling = SamplingParams(max_tokens=max_tokens, n=3)
            handle = engine.submit(mock_prompt([65] * 6), sampling, logits_processors=[second_fails])
            with pytest.raises(RequestError, match="boom"):
                handle.result(20)
            assert not list(handle._deltas)
            assert not engine._loop._open
            settle(engine)


class Wasteful(MockModel):
    """Gives more rows than it was asked for."""

    def forward(self, batch: Any) -> torch.Tensor:
        logits = super().forward(batch)
        return torch.cat([logits, logits])


def test_wrong_numbers_of_logits_are_said_in_words() -> None:
    with running(Wasteful()) as engine, pytest.raises(ModelOutputError, match="2 rows of logits, but 1 were"):
        ask(engine, mock_prompt([65]))


def test_an_abort_takes_no_place_in_the_queue() -> None:
    with running(MockModel(forward_seconds=0.5), max_queue=2, max_num_seqs=1) as engine:
        first = engine.submit(mock_prompt([65]), SamplingParams(max_tokens=50))
        next(iter_without_abort(first))
        for _ in range(5):
            first.abort()
        assert engine.submit(mock_prompt([65]), SamplingParams(max_tokens=1)).result(WAIT)


def test_a_full_queue_refuses() -> None:
    with running(MockModel(forward_seconds=0.005), max_queue=2, max_num_seqs=1) as engine:
        first = engine.submit(mock_prompt([65]), SamplingParams(max_tokens=100))
        next(iter_without_abort(first))
        handles = [engine.submit(mock_prompt([65]), SamplingParams(max_tokens=1)) for _ in range(2)]
        with pytest.raises(Overloaded, match="max_queue is 2"):
            engine.submit(mock_prompt([65]))
        first.abort()
        assert all(handle.result(WAIT) for handle in handles)


def iter_without_abort(handle: RequestHandle) -> Iterator[object]:
    """The stream, kept alive by the caller's frame as long as the test runs."""
    while not handle._deltas:
        time.sleep(0.001)
    yield handle._deltas[0]


def test_a_deadline_is_kept() -> None:
    with running(MockModel(forward_seconds=0.005), max_num_seqs=1) as engine:
        slow = engine.submit(mock_prompt([65]), SamplingParams(max_tokens=100), timeout=0.05)
        queued = engine.submit(mock_prompt([65]), timeout=0.01)
        for handle in (slow, queued):
            with pytest.raises(DeadlineExceeded):
                handle.result(WAIT)
        settle(engine)


def test_what_can_not_run_is_refused_at_once() -> None:
    with running(MockModel(max_position=40)) as engine:
        with pytest.raises(CapacityError, match="expanded prompt has 39 tokens"):
            engine.submit(mock_prompt([65] * 39), SamplingParams(max_tokens=2))
        with pytest.raises(InvalidRequestError, match="logit_bias names id 300"):
            engine.submit(mock_prompt([65]), SamplingParams(logit_bias={300: 1.0}))
        with pytest.raises(InvalidRequestError, match="only placeholder ids"):
            engine.submit(mock_prompt([65]), SamplingParams(allowed_token_ids=(258,)))
        with pytest.raises(InvalidRequestError, match="timeout is a number of seconds"):
            engine.submit(mock_prompt([65]), timeout=float("nan"))
        engine.submit(mock_prompt([65]), SamplingParams(max_tokens=1), request_id="twice")
        # A default length gives way to a long prompt.
        assert len(engine.submit(mock_prompt([65] * 37)).result(WAIT).token_ids) == 3
    with pytest.raises(ConfigError, match="max_model_len 999 is too long"), running(max_model_len=999):
        pass


def test_waiting_with_a_limit_leaves_the_request_running() -> None:
    with running(MockModel(forward_seconds=0.002)) as engine:
        handle = engine.submit(mock_prompt([65]), SamplingParams(max_tokens=20))
        with pytest.raises(TimeoutError, match="no answer"):
            handle.result(0.001)
        assert len(handle.result(WAIT).token_ids) == 20


# -- threads and loops ----------------------------------------------------------------------------


def test_many_threads_and_two_event_loops_at_once() -> None:
    prompts = [mock_prompt([65 + n] * 9, [mock_image(1, 5, n)]) for n in range(8)]
    with running(num_blocks=256) as engine:
        expected = [ask(engine, prompt).text for prompt in prompts]
        results: dict[object, list[str]] = {}

        async def stream(n: int) -> str:
            handle = engine.submit(prompts[n], SamplingParams(max_tokens=8))
            return "".join([delta.text async for delta in handle])

        async def both(n: int) -> list[str]:
            handle = engine.submit(prompts[n], SamplingParams(max_tokens=8))
            return [await stream(n), (await handle.aresult()).text]

        def loop(name: str) -> None:
            async def run() -> list[list[str]]:
                return await asyncio.gather(*(both(n) for n in range(8)))

            results[name] = [text for texts in asyncio.run(run()) for text in texts]

        def plain(n: int) -> None:
            results[n] = [ask(engine, prompts[n]).text for _ in range(3)]

        threads = [threading.Thread(target=loop, args=(name,)) for name in ("one", "two")]
        threads += [threading.Thread(target=plain, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for name in ("one", "two"):
            assert results[name] == [text for text in expected for _ in range(2)]
        for n in range(4):
            assert results[n] == [expected[n]] * 3
        settle(engine)


def test_cancelling_a_task_aborts_its_request() -> None:
    with running(MockModel(forward_seconds=0.002)) as engine:

        async def run() -> RequestHandle:
            handle = engine.submit(mock_prompt([65]), SamplingParams(max_tokens=200))
            task = asyncio.create_task(handle.aresult())
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return handle

        with pytest.raises(RequestAborted):
            asyncio.run(run()).result(WAIT)
        settle(engine)


def test_memory_is_flat_after_many_different_images() -> None:
    with running(encoder_cache_memory=2000) as engine:
        for n in range(100):
            ask(engine, mock_prompt([65] * 12, [mock_image(1, 10, n)]), max_tokens=1)
        stats = engine.stats()
        assert stats["image_bytes"] <= 2000
        assert stats["images_encoded"] == 100
        assert not engine._loop._tickets
        assert not engine._loop._open
        settle(engine)
