"""A mistake is one clear error of our own tree that names the thing, and the pipeline goes on working."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmserve import GenerationRequest, MMPipeline
from mmserve.demo import demo_model_folder
from mmserve.demo.pictures import Shape, draw_shapes
from mmserve.errors import (
    CapacityError,
    ConfigError,
    InputError,
    InvalidRequestError,
    MMServeError,
    ModelLoadError,
    ModelNotFoundError,
    PipelineClosedError,
    WeightsError,
)

PICTURE = draw_shapes((Shape("circle", "red", "center"),))


@pytest.fixture(scope="module")
def pipe() -> Iterator[MMPipeline]:
    with MMPipeline(dtype="float32", num_blocks=16, max_model_len=1000) as pipe:
        yield pipe


@pytest.fixture(autouse=True)
def _still_works(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test that used the pipeline it answers as before."""
    yield
    if "pipe" in request.fixturenames:
        assert request.getfixturevalue("pipe").generate(PICTURE, "What color is the circle?", max_tokens=4).text


def _file(folder: Path, name: str, content: bytes) -> str:
    (folder / name).write_bytes(content)
    return str(folder / name)


def _truncated(folder: Path) -> str:
    PICTURE.save(folder / "whole.jpg")
    return _file(folder, "cut.jpg", (folder / "whole.jpg").read_bytes()[:-200])


IMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda folder: str(folder / "missing.png"), r"missing\.png"),
    "folder": (lambda folder: str(folder), "no regular file"),
    "text": (lambda folder: _file(folder, "notes.txt", b"hello, not a picture"), r"notes\.txt"),
    "empty": (lambda folder: _file(folder, "empty.png", b""), r"empty\.png"),
    "truncated": (_truncated, r"cut\.jpg"),
    "number": (lambda folder: 3, "int"),
    "flat array": (lambda folder: np.zeros(5), "shape|dimension"),
    "garbage bytes": (lambda folder: b"garbage" * 10_000, "bytes"),
    "garbage data URL": (lambda folder: "data:image/png;base64," + "QUJD" * 10_000, "data"),
    "private address": (lambda folder: "http://127.0.0.1:9/a.png", r"127\.0\.0\.1"),
}


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_that_can_not_be_read(pipe: MMPipeline, tmp_path: Path, name: str) -> None:
    make, message = IMAGES[name]
    with pytest.raises(InputError, match=message) as caught:
        pipe.generate(make(tmp_path), "What is it?")
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_new_tokens": 5}, "unknown field 'max_new_tokens'"),
        ({"temperature": "hot"}, "temperature"),
        ({"sampling": 3}, "sampling"),
    ],
)
def test_an_option_that_makes_no_sense(pipe: MMPipeline, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        pipe.generate(PICTURE, "What is it?", **options)


def test_an_option_of_the_processor_that_it_does_not_take(pipe: MMPipeline) -> None:
    with pytest.raises(InputError, match="sise"):
        pipe.generate(PICTURE, "What is it?", processor_options={"sise": 3})


def test_nothing_asked(pipe: MMPipeline) -> None:
    for prompt in (None, "", "  "):
        with pytest.raises(InvalidRequestError, match="empty prompt"):
            pipe.generate(None, prompt)


def test_marks_and_images_that_do_not_match(pipe: MMPipeline) -> None:
    with pytest.raises(InputError, match=r"2.*1|1.*2"):
        pipe.generate(PICTURE, "<image><image> What?", raw=True)
    with pytest.raises(InputError, match=r"1.*2|2.*1"):
        pipe.generate([PICTURE, PICTURE], "<image> What?", raw=True)


def test_a_prompt_that_can_never_fit(pipe: MMPipeline) -> None:
    with pytest.raises(CapacityError, match="1000"):
        pipe.generate(PICTURE, "word " * 2000)


def test_a_request_beside_other_arguments(pipe: MMPipeline) -> None:
    request = GenerationRequest(prompt="What is it?", images=[PICTURE])
    with pytest.raises(InvalidRequestError, match="nothing beside it"):
        pipe.generate(request, "And this?")
    with pytest.raises(InvalidRequestError, match="nothing beside it"):
        pipe.generate(request, max_tokens=3)


def test_a_batch_returns_errors_in_their_places(pipe: MMPipeline) -> None:
    results = pipe.generate_batch(
        [(PICTURE, "What color is the circle?"), ("missing.png", "?"), {"promt": "?"}, (None, "Hello?")],
        on_error="return",
    )
    kinds = [isinstance(result, MMServeError) for result in results]
    assert kinds == [False, True, True, False]
    with pytest.raises(InputError):
        pipe.generate_batch([(PICTURE, "What color is the circle?"), ("missing.png", "?")])


def test_every_prompt_of_a_batch_is_counted_by_itself(pipe: MMPipeline) -> None:
    """Three marks and three images all in all, but not one each: nobody gets the other's image."""
    uneven = [
        {"prompt": "<image><image> What?", "images": [PICTURE], "raw": True},
        {"prompt": "<image> What?", "images": [PICTURE, PICTURE], "raw": True},
    ]
    good = [{"prompt": "<image> What?", "images": [PICTURE], "raw": True}, {"prompt": "What?", "raw": True}]
    asked = [{**request, "sampling": {"max_tokens": 2}} for request in (*uneven, *good)]
    results = pipe.generate_batch(asked, on_error="return")
    assert [isinstance(result, InputError) for result in results[:2]] == [True, True]
    assert results[2].usage.image_tokens > results[3].usage.image_tokens == 0  # type: ignore[union-attr]


def test_engine_options_that_make_no_sense() -> None:
    with pytest.raises(ConfigError, match="unknown field 'blok_size'"):
        MMPipeline(blok_size=3)
    with pytest.raises(ConfigError, match="max_num_seqs"):
        MMPipeline(max_num_seqs=0)
    with pytest.raises(ConfigError, match=r"'psychic'"):
        MMPipeline(attention_backend="psychic")
    with pytest.raises(ConfigError, match="float31"):
        MMPipeline(dtype="float31")
    with pytest.raises(ConfigError, match="toaster"):
        MMPipeline(device="toaster")


def test_a_closed_pipeline_says_so() -> None:
    pipe = MMPipeline()
    pipe.close()
    pipe.close()
    for use in (lambda: pipe.generate(PICTURE, "?"), lambda: pipe.stream(PICTURE, "?"), lambda: pipe.stats()):
        with pytest.raises(PipelineClosedError):
            use()


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A copy of the demo model, to break."""
    return Path(shutil.copytree(demo_model_folder(), tmp_path / "model"))


def test_a_model_folder_without_weights(broken: Path) -> None:
    (broken / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"safetensors"):
        MMPipeline(broken)


def test_a_model_folder_with_truncated_weights(broken: Path) -> None:
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        MMPipeline(broken)


def test_a_model_folder_without_processor(broken: Path) -> None:
    for name in ("processor_config.json", "tokenizer.json", "tokenizer_config.json"):
        (broken / name).unlink()
    with pytest.raises(ModelLoadError, match=r"processor|tokenizer"):
        MMPipeline(broken)


def test_a_model_of_an_unknown_architecture(broken: Path) -> None:
    config = json.loads((broken / "config.json").read_text())
    config["model_type"] = "telepath"
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="telepath"):
        MMPipeline(broken)


@pytest.mark.parametrize(
    "defaults",
    [
        {"temperature": "hot"},
        {"temperature": -3.0},
        {"top_k": -5},
        {"max_new_tokens": "abc"},
        {"repetition_penalty": 1e-40},
    ],
)
def test_a_model_whose_generation_defaults_can_not_be(broken: Path, defaults: dict[str, object]) -> None:
    file = broken / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "do_sample": True, **defaults}))
    with pytest.raises(ModelLoadError, match=r"generation_config"):
        MMPipeline(broken)


def test_a_hub_id_without_network() -> None:
    with pytest.raises(ModelNotFoundError, match="hub"):
        MMPipeline("nobody/no-such-model-anywhere")


def test_a_picture_too_large_is_refused_by_its_header(tmp_path: Path) -> None:
    Image.new("1", (3000, 3000)).save(tmp_path / "large.png")
    with MMPipeline(max_image_pixels=1_000_000) as pipe, pytest.raises(InputError, match=r"3000.*1000000|1,000,000"):
        pipe.generate(tmp_path / "large.png", "?")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "processors", "--model", "/no/such/folder"], "there is no folder"),
        (["bench", "processors", "--model", "docs"], "holds no config.json"),
        (["bench", "processors", "--model", "a\0b"], "NUL"),
        (["fixtures", "record", "a\0b"], "NUL"),
        (["fixtures", "check", "a\0b"], "NUL"),
    ],
)
def test_a_folder_that_can_not_be_is_one_line(arguments: list[str], message: str) -> None:
    from click.testing import CliRunner

    from mmserve.cli.main import main

    done = CliRunner().invoke(main, arguments)
    assert done.exit_code in (1, 2)
    assert isinstance(done.exception, SystemExit)
    assert message in done.output


def test_a_broken_chat_template_fails_at_load(broken: Path) -> None:
    (broken / "chat_template.jinja").write_text("{% for message in messages %}", encoding="utf-8")
    with pytest.raises(ModelLoadError, match="can not render a plain question"):
        MMPipeline(broken)
