"""The command line, run as a user runs it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from PIL import Image

from mmserve import GenerationOutput
from mmserve.cli import main
from mmserve.demo.scenes import demo_scenes


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def test_generate_prints_the_text(user_folder: Path) -> None:
    result = _run("generate", "--image", "photo.jpg", "--prompt", "What color is the star?")
    assert result.exit_code == 0, result.output
    assert "yellow" in result.output.lower()


def test_generate_streams_the_same_text(user_folder: Path) -> None:
    plain = _run("generate", "--image", "photo.jpg", "--prompt", "Describe the image.")
    streamed = _run("generate", "--image", "photo.jpg", "--prompt", "Describe the image.", "--stream")
    assert streamed.exit_code == 0
    assert streamed.output == plain.output


def test_generate_prints_json_that_is_a_generation_output(user_folder: Path) -> None:
    result = _run(
        "generate", "--image", "photo.jpg", "--image", "other.jpg", "--prompt", "Which image has a circle?", "--json"
    )
    output = GenerationOutput.model_validate_json(result.output)
    assert "second" in output.text.lower()
    assert output.usage.image_tokens > 2 * 64


def test_stream_and_json_exclude_each_other(user_folder: Path) -> None:
    result = _run("generate", "--prompt", "x", "--stream", "--json")
    assert result.exit_code == 2
    assert "choose one" in result.output


def test_describe_says_what_was_chosen() -> None:
    described = json.loads(_run("describe", "--dtype", "float32").output)
    assert described["dtype"] == "float32"
    assert {"folder", "processor", "engine"} <= described.keys()


def test_demo_saves_pictures_and_a_sheet(user_folder: Path) -> None:
    result = _run("demo", "--out", "shown")
    assert result.exit_code == 0, result.output
    sheet = Path(result.output.rsplit("sheet: ", 1)[1].strip())
    assert sheet == (user_folder / "shown" / "sheet.png").resolve()
    with Image.open(sheet) as picture:
        assert picture.width > 600
    for scene in demo_scenes():
        for question in scene.questions:
            assert question in result.output
    assert len(list((user_folder / "shown").glob("picture-*.png"))) == sum(len(s.pictures) for s in demo_scenes())


def test_inspect_shows_tokens_and_tiles_as_table_json_and_picture(user_folder: Path) -> None:
    ask = ("inspect", "--image", "photo.jpg", "--image", "other.jpg", "--prompt", "Which image has a star?")
    table = _run(*ask)
    assert table.exit_code == 0, table.output
    shown = json.loads(_run(*ask, "--json").output)
    kinds = [token["kind"] for token in shown["tokens"]]
    for number, image in enumerate(shown["images"], start=1):
        span = kinds[image["offset"] : image["offset"] + image["length"]]
        assert set(span) == {"image", "structure"}
        assert span.count("image") == image["rows"]
        assert f"image {number}" in table.output
        tokens = [(tile["first_token"], tile["last_token"]) for tile in image["tiles"]]
        assert tokens == sorted(tokens)
        assert sum(last - first + 1 for first, last in tokens) == image["rows"]
    assert _run(*ask, "--out", "sheet.png").exit_code == 0
    with Image.open("sheet.png") as sheet:
        assert sheet.width > 1000


def test_bench_ends_in_one_line_of_json() -> None:
    for arguments in (("scheduler", "--sequences", "4"), ("processors", "--images", "2")):
        result = _run("bench", *arguments)
        assert result.exit_code == 0, result.output
        assert json.loads(result.output.strip().splitlines()[-1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--image", "missing.png", "--prompt", "x"], "missing.png"),
        (["generate", "--image", "photo.jpg", "--prompt", "x", "--max-tokens", "-1"], "max_tokens"),
        (["generate", "--prompt", " "], "an empty prompt needs at least one image"),
        (["generate", "--prompt", "x", "--model", "./nowhere"], "there is no folder"),
        (["generate", "--prompt", "x", "--dtype", "float31"], "float31"),
        (["fixtures", "check", "nowhere"], "there is no fixture folder"),
        (["inspect", "--image", "photo.jpg", "--out", "no/such/folder/sheet.png"], "sheet.png"),
    ],
)
def test_a_mistake_is_one_line_and_exit_status_1(user_folder: Path, arguments: list[str], message: str) -> None:
    done = subprocess.run([sys.executable, "-m", "mmserve", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


def test_fixtures_are_recorded_checked_and_a_difference_is_shown(user_folder: Path) -> None:
    folder = user_folder / "fixtures"
    folder.mkdir()
    shutil.copy("photo.jpg", folder)
    (folder / "color.json").write_text('{"prompt": "What color is the star?", "images": ["photo.jpg"]}')
    recorded = _run("fixtures", "record", "fixtures", "--dtype", "float32")
    assert recorded.exit_code == 0, recorded.output
    checked = _run("fixtures", "check", "fixtures", "--dtype", "float32")
    assert checked.exit_code == 0, checked.output
    assert "1 of 1 as recorded" in checked.output

    shutil.copy("other.jpg", folder / "photo.jpg")  # another picture under the recorded name
    (folder / "color.json").write_text('{"prompt": "Where is the circle?", "images": ["photo.jpg"]}')
    changed = _run("fixtures", "check", "fixtures", "--dtype", "float32")
    assert changed.exit_code == 1
    assert "first differing token: number 0" in changed.output
    assert "likeliest" in changed.output

    other_dtype = _run("fixtures", "check", "fixtures", "--dtype", "bfloat16")
    assert other_dtype.exit_code == 1
