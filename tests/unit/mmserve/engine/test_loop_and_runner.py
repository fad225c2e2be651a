"""The corners of loop and runner: models with state of their own, dropped engines, stats, the benchmark."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from mmserve.bench.scheduler import run as bench
from mmserve.config import EngineConfig
from mmserve.engine.batch import SampledToken, StepOutput
from mmserve.engine.core import Engine, RequestHandle
from mmserve.engine.loop import EngineLoop
from mmserve.engine.random import derive_seed
from mmserve.engine.runner import ModelRunner
from mmserve.engine.scheduler import Scheduler, SchedulerLimits
from mmserve.engine.stats import StatsRecorder
from mmserve.errors import EngineDeadError, InputError, InvalidRequestError, ModelOutputError, RequestAborted
from mmserve.model.interface import ImageRows, PackedBatch
from mmserve.testing import ByteTokenizer, MockModel, mock_image, mock_prompt
from mmserve.types import SamplingParams
from processors.types import ImageItem, ProcessedPrompt

WAIT = 300


class StatefulModel(MockModel):
    """Keeps what each request has said, as a model without a paged cache would; one id makes it fail."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.needs_sequences = True
        self.said: dict[str, list[int]] = {}

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        (sequence,) = batch.sequences
        if sequence.start == 0:
            self.said[sequence.request_id] = []
        said = self.said[sequence.request_id]
        assert len(said) == sequence.start
        said += batch.token_ids.tolist()
        if 90 in said:
            raise InputError("no 90, please")
        return super().forward(batch)

    def release(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.said.pop(request_id, None)


def make(model: MockModel, **options: Any) -> Engine:
    config = EngineConfig(**{"block_size": 4, "num_blocks": 12, "max_num_batched_tokens": 16} | options)
    return Engine(model, ByteTokenizer(), config, identity="mock")


def test_a_model_with_state_of_its_own_hears_of_every_end_and_preemption() -> None:
    prompts = [mock_prompt([65 + n] * 10) for n in range(4)]
    plain = make(MockModel())
    sampling = SamplingParams(max_tokens=12, n=2, seed=3, temperature=1.0)
    expected = [plain.submit(prompt, sampling).result(WAIT) for prompt in prompts]
    plain.close()
    model = StatefulModel()
    engine = make(model)
    try:
        handles = [engine.submit(prompt, sampling) for prompt in prompts]
        bad = engine.submit(mock_prompt([90, 65]))
        for handle, output in zip(handles, expected, strict=True):
            result = handle.result(WAIT)
            assert result.token_ids == output.token_ids
            assert [other.token_ids for other in result.others] == [other.token_ids for other in output.others]
            assert result.usage.cached_tokens == 0
        with pytest.raises(InputError, match="no 90"):
            bad.result(WAIT)
        assert engine.stats()["preemptions"] > 0
        deadline = time.monotonic() + WAIT
        while model.said and time.monotonic() < deadline:
            time.sleep(0.001)
        assert not model.said
        assert not engine.describe()["prefix_caching"]
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Scheduler, "schedule"),
        (ModelRunner, "run"),
        (ModelRunner, "_take_in"),
        (ModelRunner, "_sample"),
        (Scheduler, "update"),
        (EngineLoop, "_deliver"),
        (EngineLoop, "_expire"),
    ],
)
def test_wherever_a_step_is_killed_everyone_hears(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    calls = itertools.count()
    original = getattr(owner, name)

    def killed(*args: Any, **options: Any) -> Any:
        if next(calls) == 3:
            raise MemoryError("killed here")
        return original(*args, **options)

    monkeypatch.setattr(owner, name, killed)
    engine = make(MockModel(forward_seconds=0.001))
    handles = [engine.submit(mock_prompt([65] * 5), SamplingParams(max_tokens=40, n=2)) for _ in range(4)]
    for handle in handles:
        with pytest.raises(EngineDeadError, match="MemoryError: killed here"):
            handle.result(WAIT)
    with pytest.raises(EngineDeadError):
        engine.submit(mock_prompt([65]))
    engine.close()


def test_rows_that_are_views_of_a_batch_are_copied() -> None:
    class Batched(MockModel):
        def encode(self, images: Sequence[ImageItem]) -> list[ImageRows | Exception]:
            rows = [result for result in super().encode(images) if isinstance(result, ImageRows)]
            together = torch.cat([one.rows for one in rows])
            parts = together.split([len(one.rows) for one in rows])
            return [ImageRows(part, one.extra) for part, one in zip(parts, rows, strict=True)]

    engine = make(Batched())
    try:
        prompt = mock_prompt([65] * 16, [mock_image(1, 5, 1), mock_image(6, 7, 2)])
        engine.submit(prompt, SamplingParams(max_tokens=1)).result(WAIT)
        assert engine.stats()["image_bytes"] == 8 * 2 * (5 + 7)
        for rows in engine._runner._images.values():
            assert rows.rows.untyped_storage().nbytes() == rows.rows.numel() * 8
    finally:
        engine.close()


def test_prompts_that_make_no_sense_are_refused() -> None:
    engine = make(MockModel())
    try:
        with pytest.raises(InvalidRequestError, match="no tokens"):
            engine.submit(mock_prompt([]))
        for images in ([mock_image(3, 4)], [mock_image(1, 3), mock_image(2, 2)], [mock_image(3, 1), mock_image(1, 1)]):
            with pytest.raises(InvalidRequestError, match="do not lie one after the other"):
                engine.submit(ProcessedPrompt((65,) * 5, tuple(images)))
        assert engine.submit(mock_prompt([65])).result(WAIT)
    finally:
        engine.close()


def test_leaving_an_async_stream_early_aborts() -> None:
    engine = make(MockModel(forward_seconds=0.001), num_blocks=64)
    try:

        async def first_delta() -> RequestHandle:
            handle = engine.submit(mock_prompt([65]), SamplingParams(max_tokens=200))
            async for _ in handle:
                break
            return handle

        with pytest.raises(RequestAborted):
            asyncio.run(first_delta()).result(WAIT)
    finally:
        engine.close()


def test_nan_of_a_failed_request_does_not_reach_who_gets_its_blocks() -> None:
    engine = make(MockModel(nan_after={90}), num_blocks=3, block_size=8)
    try:
        good = mock_prompt([65] * 10)
        expected = engine.submit(good, SamplingParams(max_tokens=4)).result(WAIT).token_ids
        for _ in range(3):
            with pytest.raises(ModelOutputError):
                engine.submit(mock_prompt([90] * 20), SamplingParams(max_tokens=1)).result(WAIT)
            # All three answers get to id 90, each in a block of its own.
            biased = SamplingParams(max_tokens=9, n=3, logit_bias={90: 99.0})
            with pytest.raises(ModelOutputError):
                engine.submit(mock_prompt([65] * 3), biased).result(WAIT)
            assert engine.submit(good, SamplingParams(max_tokens=4)).result(WAIT).token_ids == expected
    finally:
        engine.close()


def test_an_id_in_use_is_refused() -> None:
    engine = make(MockModel(forward_seconds=0.002))
    try:
        handle = engine.submit(mock_prompt([65]), SamplingParams(max_tokens=30), request_id="mine")
        with pytest.raises(InvalidRequestError, match="'mine' is still running"):
            engine.submit(mock_prompt([65]), request_id="mine")
        assert handle.result(WAIT).request_id == "mine"
        assert engine.submit(mock_prompt([65]), SamplingParams(max_tokens=1), request_id="mine").result(WAIT)
    finally:
        engine.close()


def test_an_id_used_again_is_safe_from_the_deadline_and_the_handle_of_its_first_user() -> None:
    engine = make(MockModel(forward_seconds=0.002))
    try:
        first = engine.submit(mock_prompt([65]), SamplingParams(max_tokens=1), request_id="mine", timeout=0.05)
        assert first.result(WAIT)
        second = engine.submit(mock_prompt([65]), SamplingParams(max_tokens=40), request_id="mine")
        engine._abort(first)
        assert len(second.result(WAIT).token_ids) == 40
    finally:
        engine.close()


def test_deadlines_of_finished_requests_do_not_pile_up() -> None:
    engine = make(MockModel())
    try:
        for _ in range(200):
            engine.submit(mock_prompt([65]), SamplingParams(max_tokens=1), timeout=1000).result(WAIT)
        assert len(engine._loop._deadlines) < 100
    finally:
        engine.close()


def test_dropping_the_engine_ends_its_thread_and_frees_it() -> None:
    before = set(threading.enumerate())
    engine = make(MockModel())
    engine.submit(mock_prompt([65]), SamplingParams(max_tokens=2)).result(WAIT)
    (thread,) = set(threading.enumerate()) - before
    del engine
    gc.collect()
    thread.join(WAIT)
    assert not thread.is_alive()


def test_a_finished_request_with_a_deadline_does_not_keep_its_engine() -> None:
    engine = make(MockModel())
    kept = engine.submit(mock_prompt([65]), SamplingParams(max_tokens=2), timeout=1000)
    failed = engine.submit(mock_prompt([65]), SamplingParams(max_tokens=20), timeout=1000)
    failed.abort()
    assert kept.result(WAIT)
    with pytest.raises(RequestAborted):
        failed.result(WAIT)
    thread = engine._loop._thread
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    thread.join(WAIT)
    assert gone() is None
    assert not thread.is_alive()
    kept.abort()  # still harmless


@pytest.mark.parametrize("dies", [False, True])
def test_a_model_with_state_of_its_own_keeps_nothing_after_the_end(dies: bool) -> None:
    model = StatefulModel(forward_seconds=0.002, dies_on={91} if dies else ())
    engine = make(model, num_blocks=64)
    handle = engine.submit(mock_prompt([65] * 3), SamplingParams(max_tokens=100))
    stream = iter(handle)
    next(stream)
    assert model.said
    if dies:
        engine.submit(mock_prompt([91]))
        with pytest.raises(EngineDeadError):
            handle.result(WAIT)
    engine.close()
    assert not model.said
    assert engine._runner.num_requests == 0


def test_a_model_with_state_of_its_own_refuses_a_report_on_the_prompt() -> None:
    engine = make(StatefulModel())
    try:
        with pytest.raises(InvalidRequestError, match="prompt_logprobs"):
            engine.submit(mock_prompt([65] * 3), SamplingParams(prompt_logprobs=1))
    finally:
        engine.close()


def test_answers_that_wait_one_by_one_are_one_request_in_the_queue() -> None:
    engine = make(StatefulModel(forward_seconds=0.3), max_queue=2, max_num_seqs=1)
    try:
        several = engine.submit(mock_prompt([65]), SamplingParams(max_tokens=1, n=3))
        while engine._scheduler.num_waiting + engine.stats()["steps"] < 2:
            time.sleep(0.001)
        assert engine.submit(mock_prompt([65]), SamplingParams(max_tokens=1)).result(WAIT)
        assert len(several.result(WAIT).others) == 2
    finally:
        engine.close()


def test_the_rate_counts_the_time_of_steps_and_not_between_them() -> None:
    limits = SchedulerLimits(
        block_size=4,
        num_blocks=4,
        max_num_seqs=2,
        max_num_batched_tokens=8,
        max_model_len=16,
        max_images_per_step=1,
        encoder_cache_memory=0,
    )
    scheduler = Scheduler(limits, None)
    batch, stats = scheduler.schedule(), StatsRecorder()
    for began in (100.0, 108.0):
        stats.record(batch, StepOutput({"a": SampledToken(1)}), began, began + 0.5)
    assert stats.snapshot(scheduler, 0, 109.0)["tokens_per_second"] == pytest.approx(2.0)
    assert stats.snapshot(scheduler, 0, 1000.0)["tokens_per_second"] == 0.0


def test_a_request_outlives_a_dropped_engine() -> None:
    handle = make(MockModel()).submit(mock_prompt([65]), SamplingParams(max_tokens=5))
    gc.collect()
    assert len(handle.result(WAIT).token_ids) == 5


def test_stats_count() -> None:
    engine = make(MockModel())
    try:
        prompt = mock_prompt([65] * 9, [mock_image(1, 5)])
        for _ in range(2):
            engine.submit(prompt, SamplingParams(max_tokens=3)).result(WAIT)
        with pytest.raises(InvalidRequestError):
            engine.submit(prompt, SamplingParams(allowed_token_ids=(999,)))
        stats = engine.stats()
        assert stats["finished"] == 2
        assert stats["generated_tokens"] == 6
        assert stats["computed_tokens"] == 9 + 2 + 1 + 2
        assert stats["prefix_hit_rate"] == pytest.approx(8 / 18)
        assert (stats["images_encoded"], stats["images_cached"]) == (1, 1)
        assert stats["waiting"] == stats["running"] == 0
    finally:
        engine.close()


def test_seeds_of_several_answers_are_below_the_limit() -> None:
    assert all(0 <= derive_seed(2**63 - 1, index) < 2**63 for index in range(64))


def test_the_benchmark_runs() -> None:
    result = bench(num_seqs=4, num_steps=5, prompt_lengths=(8,), queue_lengths=(0, 3), num_blocks=100)
    assert [case["queue"] for case in result["cases"]] == [0, 3]  # type: ignore[attr-defined]


def test_pixels_are_let_go_once_encoded_and_a_preempted_request_needs_none() -> None:
    def picture(number: int) -> tuple[ProcessedPrompt, weakref.ref[torch.Tensor]]:
        pixels = torch.full((1000,), float(number))
        image = replace(mock_image(1, 4, key=f"picture {number}"), tensors={"pixel_values": pixels})
        return ProcessedPrompt((65 + number, *[1] * 4, 66), (image,)), weakref.ref(pixels)

    sampling = SamplingParams(max_tokens=14, temperature=0.0)
    roomy = make(MockModel(), num_blocks=64)
    expected = [roomy.submit(picture(number)[0], sampling).result(WAIT).token_ids for number in range(4)]
    roomy.close()

    left: list[int] = []

    def count(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        left.append(sum(pixels() is not None for pixels in alive))
        return scores

    model = MockModel()
    engine = make(model, num_blocks=8, encoder_cache_memory=0)
    try:
        prompts, alive = zip(*(picture(number) for number in range(4)), strict=True)
        handles = [engine.submit(prompt, sampling, logits_processors=[count]) for prompt in prompts]
        del prompts
        assert [handle.result(WAIT).token_ids for handle in handles] == expected
        assert engine.stats()["preemptions"] > 0
        assert sorted(model.encoded) == [f"picture {number}" for number in range(4)]
        assert left[-1] == 0
        assert min(left[: len(left) // 2]) < 4, "all pixels are there for half of the time"
        engine.check_integrity()
    finally:
        engine.close()
