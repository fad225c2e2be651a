"""The public face over the demo model: forms of asking, streams, batches, threads, ending."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mmserve import GenerationOutput, GenerationRequest, ImageInput, MMPipeline, SamplingParams, pipeline
from mmserve.demo.pictures import Shape, draw_shapes
from mmserve.errors import DeadlineExceeded, InvalidRequestError, PipelineClosedError, RequestAborted

STAR = draw_shapes((Shape("star", "yellow", "top left"),))
CIRCLE = draw_shapes((Shape("circle", "red", "right"),))
QUESTION = "Describe the image."


@pytest.fixture(scope="module")
def pipe() -> Iterator[MMPipeline]:
    with MMPipeline(dtype="float32", num_blocks=128) as pipe:
        yield pipe


@pytest.fixture(scope="module")
def expected(pipe: MMPipeline) -> GenerationOutput:
    return pipe.generate(STAR, QUESTION, max_tokens=30)


def _png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


FORMS = {
    "PIL": lambda folder: STAR,
    "path": lambda folder: folder / "star.png",
    "str": lambda folder: str(folder / "star.png"),
    "bytes": lambda folder: _png(STAR),
    "file": lambda folder: io.BytesIO(_png(STAR)),
    "numpy": lambda folder: np.asarray(STAR),
    "torch": lambda folder: torch.from_numpy(np.array(STAR)).permute(2, 0, 1),
    "data URL": lambda folder: GenerationRequest(prompt="x", images=[STAR]).model_dump(mode="json")["images"][0][
        "source"
    ],
    "list": lambda folder: [STAR],
    "tuple": lambda folder: (folder / "star.png",),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_an_image_gives_the_same_answer(
    pipe: MMPipeline, expected: GenerationOutput, tmp_path: Path, form: str
) -> None:
    STAR.save(tmp_path / "star.png")
    answer = pipe.generate(FORMS[form](tmp_path), QUESTION)
    assert answer.token_ids == expected.token_ids
    assert answer.usage.prompt_tokens == expected.usage.prompt_tokens


def test_every_form_of_a_request_gives_the_same_answer(pipe: MMPipeline, expected: GenerationOutput) -> None:
    request = GenerationRequest(prompt=QUESTION, images=[STAR])
    turn = {"role": "user", "content": [{"type": "image", "image": STAR}, {"type": "text", "text": QUESTION}]}
    raw = f"<|user|><image>{QUESTION}<end_of_utterance><|assistant|>"
    for answer in (
        pipe.generate(request),
        pipe.generate(STAR, QUESTION, sampling=SamplingParams()),
        pipe.generate(GenerationRequest.model_validate_json(request.model_dump_json())),
        pipe.chat([turn]),
        pipe.generate(STAR, raw, raw=True),
        *pipe.generate_batch([request, {"prompt": QUESTION, "images": [STAR]}, (STAR, QUESTION)]),
    ):
        assert isinstance(answer, GenerationOutput)
        assert answer.token_ids == expected.token_ids


def test_usage_counts_the_expanded_prompt(pipe: MMPipeline) -> None:
    none, one, two = (pipe.generate(images, "Hello?", max_tokens=1).usage for images in (None, STAR, [STAR, CIRCLE]))
    assert none.image_tokens == 0
    prompt = pipe.prepare((STAR, "Hello?"))
    assert one.prompt_tokens == len(prompt.token_ids)
    assert one.image_tokens == prompt.num_image_tokens > 64
    assert two.image_tokens == 2 * one.image_tokens
    assert one.completion_tokens == 1


def test_a_second_question_about_the_same_picture_comes_from_the_caches(pipe: MMPipeline) -> None:
    picture = draw_shapes((Shape("cross", "green", "bottom"),), 201, 199)
    first = pipe.generate(picture, "Where is the cross?")
    encoded = pipe.stats()["images_encoded"]
    second = pipe.generate(picture, "What color is the cross?")
    assert first.usage.cached_tokens == 0
    assert second.usage.cached_tokens >= 256
    assert pipe.stats()["images_encoded"] == encoded


def test_a_callers_id_takes_the_place_of_the_pixels(pipe: MMPipeline) -> None:
    def key(picture: Image.Image, name: str | None) -> str:
        return pipe.prepare({"prompt": QUESTION, "images": [ImageInput(source=picture, uuid=name)]}).images[0].key

    assert STAR.size == CIRCLE.size
    assert key(STAR, "a") == key(CIRCLE, "a") != key(STAR, "b")
    assert key(STAR, None) not in {key(STAR, "a"), key(CIRCLE, None)}


def test_deltas_add_up_and_the_last_one_has_the_output(pipe: MMPipeline, expected: GenerationOutput) -> None:
    deltas = list(pipe.stream(STAR, QUESTION))
    assert "".join(delta.text for delta in deltas) == expected.text
    assert [delta.output is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert deltas[-1].output is not None
    assert deltas[-1].output.token_ids == expected.token_ids
    assert sum((delta.token_ids for delta in deltas), ()) == expected.token_ids


def test_leaving_a_stream_aborts_it(pipe: MMPipeline) -> None:
    stream = pipe.stream(STAR, QUESTION, max_tokens=500, ignore_eos=True)
    next(stream)
    stream.close()
    pipe.generate(STAR, QUESTION)
    assert pipe.stats()["running"] == 0


def test_letting_go_of_a_stream_aborts_it_even_before_its_first_delta(pipe: MMPipeline) -> None:
    stream = pipe.stream(STAR, QUESTION, max_tokens=500, ignore_eos=True)
    del stream
    pipe.generate(STAR, QUESTION, max_tokens=2)
    assert pipe.stats()["running"] == 0


def test_a_request_is_aborted_by_its_id_wherever_it_is(pipe: MMPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pipe.abort("nobody") is False
    sampling = SamplingParams(max_tokens=300, ignore_eos=True)
    request = GenerationRequest(prompt="Hello?", sampling=sampling, request_id="mine")
    stream = pipe.stream(request)
    assert stream.request_id == "mine"
    with pytest.raises(InvalidRequestError, match="'mine' is still running"):
        pipe.generate(request)
    assert pipe.abort("mine") is True
    with pytest.raises(RequestAborted):
        list(stream)
    # And while a worker still prepares it:
    begun, go_on = threading.Event(), threading.Event()
    original = pipeline.process_request

    def slow(*args: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        return original(*args)

    monkeypatch.setattr(pipeline, "process_request", slow)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(pipe.generate, request)
        assert begun.wait(60)
        assert pipe.abort("mine") is True
        go_on.set()
        with pytest.raises(RequestAborted):
            waiting.result(60)
    assert not pipe._preparing


def test_a_timeout_counts_from_the_call(pipe: MMPipeline) -> None:
    with pytest.raises(DeadlineExceeded):
        pipe.generate(STAR, QUESTION, timeout=1e-4)
    with pytest.raises(DeadlineExceeded):
        asyncio.run(pipe.agenerate(STAR, QUESTION, timeout=1e-4))


def test_cancelling_a_task_aborts_its_request(pipe: MMPipeline) -> None:
    async def cancelled(delay: float) -> None:
        task = asyncio.create_task(pipe.agenerate(STAR, QUESTION, max_tokens=500, ignore_eos=True))
        await asyncio.sleep(delay)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    for delay in (0.0, 0.2):  # while the image is processed, and while tokens are made
        asyncio.run(cancelled(delay))
    pipe.generate(CIRCLE, QUESTION, max_tokens=2)
    assert pipe.stats()["running"] == 0


def test_closing_in_the_middle_of_everything_is_one_error_for_all() -> None:
    pipe = MMPipeline(dtype="float32", num_blocks=64, preprocess_threads=1)
    with ThreadPoolExecutor(6) as threads:
        asked = [threads.submit(pipe.generate, STAR, QUESTION, max_tokens=400, ignore_eos=True) for _ in range(6)]
        pipe.close()
        for future in asked:
            with pytest.raises((PipelineClosedError, RequestAborted)):
                future.result(timeout=60)


def test_sampling_with_a_seed_is_the_same_in_any_company(pipe: MMPipeline) -> None:
    sampled = {"prompt": QUESTION, "images": [STAR], "sampling": {"temperature": 5.0, "seed": 3, "max_tokens": 8}}
    alone = pipe.generate_batch([sampled])[0]
    crowd = pipe.generate_batch([(CIRCLE, QUESTION), sampled, (None, "Hello?"), {**sampled, "sampling": {"seed": 4}}])[
        1
    ]
    assert isinstance(alone, GenerationOutput)
    assert isinstance(crowd, GenerationOutput)
    assert alone.token_ids == crowd.token_ids


def test_your_own_logits_processors_reach_every_way_of_asking(pipe: MMPipeline) -> None:
    calls = []

    def only(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        calls.append(ids.shape)
        masked = torch.full_like(scores, float("-inf"))
        masked[0, 40 + ids.shape[1] % 2] = 0.0
        return masked

    options: dict[str, Any] = {"max_tokens": 2, "logits_processors": [only]}
    request = GenerationRequest(prompt="Hello?", sampling=SamplingParams(max_tokens=2), logits_processors=[only])

    async def both() -> list[GenerationOutput]:
        deltas = [delta async for delta in pipe.astream(None, "Hello?", **options)]
        assert deltas[-1].output is not None
        return [await pipe.agenerate(None, "Hello?", **options), deltas[-1].output]

    outputs = [
        pipe.generate(None, "Hello?", **options),
        pipe.generate(request),
        *[delta.output for delta in pipe.stream(None, "Hello?", **options) if delta.output],
        pipe.chat([{"role": "user", "content": "Hello?"}], **options),
        *pipe.generate_batch(
            [request, {"prompt": "Hello?", "sampling": {"max_tokens": 2}, "logits_processors": [only]}]
        ),
        *asyncio.run(both()),
    ]
    assert len(calls) == 2 * len(outputs) == 16
    assert {frozenset(output.token_ids) for output in outputs} == {frozenset((40, 41))}
    with pytest.raises(InvalidRequestError, match="give nothing beside it"):
        pipe.generate(request, logits_processors=[only])


def test_a_logits_processor_can_not_ask_its_own_pipeline(pipe: MMPipeline) -> None:
    """It runs in the thread that would have to answer; every way of asking is refused at once, and nothing is begun."""
    request = GenerationRequest(prompt="Hello?", sampling=SamplingParams(max_tokens=1))
    messages = [{"role": "user", "content": "Hello?"}]

    async def streamed() -> None:
        async for _ in pipe.astream(request):
            pass

    ways: list[Any] = [
        lambda: pipe.generate(request),
        lambda: list(pipe.stream(request)),
        lambda: pipe.chat(messages, max_tokens=1),
        lambda: asyncio.run(pipe.agenerate(request)),
        lambda: asyncio.run(streamed()),
        lambda: pipe.generate_batch([request]),
    ]
    refused = []

    def asks(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for way in ways:
            with pytest.raises(InvalidRequestError, match="or ask another pipeline"):
                way()
            refused.append(way)
        assert pipe.abort("nobody") is False
        return scores

    before = pipe.stats()["finished"]
    assert pipe.generate(None, "Hello?", max_tokens=1, logits_processors=[asks]).token_ids
    assert refused == ways
    assert pipe.stats()["finished"] == before + 1


@pytest.mark.parametrize("value", [[], None, 1])
def test_what_is_no_id_can_not_be_aborted(pipe: MMPipeline, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="a request's id is a string"):
        pipe.abort(value)


def test_a_batch_larger_than_the_window_keeps_its_order() -> None:
    colours = ["red", "green", "blue", "yellow", "purple", "orange"]
    pictures = [draw_shapes((Shape("square", colour, "center"),), 64, 64) for colour in colours]
    with MMPipeline(dtype="float32", max_num_seqs=2, num_blocks=32) as pipe:
        alone = [pipe.generate(picture, "What color is it?") for picture in pictures]
        together = pipe.generate_batch([(picture, "What color is it?") for picture in pictures])
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]


def test_a_progress_bar_counts_requests_if_wanted(pipe: MMPipeline, capsys: pytest.CaptureFixture[str]) -> None:
    pipe.generate_batch([(STAR, "Where?")] * 2, progress=True)
    assert "2/2" in capsys.readouterr().err
    pipe.generate_batch([(STAR, "Where?")] * 2)
    assert capsys.readouterr().err == ""  # no terminal, and no long work


def test_many_threads_share_one_pipeline(pipe: MMPipeline, expected: GenerationOutput) -> None:
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: pipe.generate(STAR, QUESTION).token_ids, range(16)))
    assert answers == [expected.token_ids] * 16


def test_awaiting_gives_the_same_answer_to_many_at_once(pipe: MMPipeline, expected: GenerationOutput) -> None:
    async def ask() -> list[Any]:
        return await asyncio.gather(
            *(pipe.agenerate(STAR, QUESTION, max_tokens=30) for _ in range(4)), collect(), pipe.agenerate(request)
        )

    async def collect() -> GenerationOutput:
        last = None
        text = ""
        async for delta in pipe.astream(STAR, QUESTION, max_tokens=30):
            text += delta.text
            last = delta.output
        assert last is not None
        assert last.text == text
        return last

    request = GenerationRequest(prompt=QUESTION, images=[STAR], sampling={"max_tokens": 30})
    for _ in range(2):  # a second event loop on the same pipeline
        assert {answer.token_ids for answer in asyncio.run(ask())} == {expected.token_ids}


def test_closing_tells_who_waits_and_leaves_no_thread() -> None:
    before = {thread.name for thread in threading.enumerate()}
    pipe = MMPipeline(dtype="float32", num_blocks=64)
    stream = pipe.stream(STAR, QUESTION, max_tokens=2000, ignore_eos=True)
    next(stream)
    pipe.close()
    with pytest.raises((PipelineClosedError, RequestAborted)):
        list(stream)
    assert {thread.name for thread in threading.enumerate()} <= before


def test_describe_is_json_and_names_every_choice(pipe: MMPipeline) -> None:
    import json

    described: dict[str, Any] = json.loads(json.dumps(pipe.describe()))
    assert described["class"] == "Idefics3ForConditionalGeneration"
    assert described["attention"][0]["backend"]
    assert described["processor"]["chat_template"]
    assert described["engine"]["sampling_defaults"]["temperature"] == 0.0


def test_a_model_without_a_template_takes_prompts_raw(tmp_path: Path) -> None:
    import shutil

    from mmserve.demo import demo_model_folder

    folder = Path(shutil.copytree(demo_model_folder(), tmp_path / "model"))
    (folder / "chat_template.jinja").unlink()
    with MMPipeline(folder, dtype="float32", num_blocks=64) as bare:
        prompt = bare.prepare((STAR, "Where?"))
        assert prompt.images[0].range.offset <= 1
        assert "raw" in str(bare.describe()["processor"]["chat_template"])
        assert bare.generate(STAR, "Where?", max_tokens=3, ignore_eos=True).usage.completion_tokens == 3
