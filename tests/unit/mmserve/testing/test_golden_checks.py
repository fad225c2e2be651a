"""Golden fixtures: what a difference looks like, and that nothing passes by accident."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from mmserve.errors import FixtureError
from mmserve.testing.golden import (
    GoldenCase,
    check_case,
    find_cases,
    golden_test,
    load_request,
    record_case,
    save_request,
)
from mmserve.types import GenerationOutput, GenerationRequest, Logprob, Metrics, TokenLogprobs, Usage
from processors.types import ImageItem, PlaceholderRange, ProcessedPrompt


class CannedPipe:
    """Answers as it is told; records what it was asked."""

    def __init__(self, ids: tuple[int, ...] = (7, 8, 9), **changes: Any) -> None:
        self.ids, self.changes, self.asked = ids, changes, []

    def describe(self) -> dict[str, object]:
        return {"dtype": self.changes.get("dtype", "float32")}

    def prepare(self, request: GenerationRequest) -> ProcessedPrompt:
        span = PlaceholderRange(1, self.changes.get("length", 3), None)
        return ProcessedPrompt((1, 2, 2, 2, 3), (ImageItem("key", span, {}, (4, 4)),))

    def generate(self, request: GenerationRequest) -> GenerationOutput:
        self.asked.append(request)
        first = self.changes.get("logprob", -0.25)
        return GenerationOutput(
            text=self.changes.get("text", "".join(map(str, self.ids))),
            token_ids=self.ids,
            finish_reason=self.changes.get("finish", "stop"),
            usage=Usage(prompt_tokens=5, image_tokens=3, cached_tokens=0, completion_tokens=len(self.ids)),
            metrics=Metrics(preprocess=0, queue=0, encode=0, first_token=0, total=0),
            logprobs=tuple(
                TokenLogprobs(
                    chosen=Logprob(token_id=i, logprob=first, text=f"t{i}"),
                    top=(
                        Logprob(token_id=i, logprob=first, text=f"t{i}"),
                        Logprob(token_id=0, logprob=-5, text="other"),
                    ),
                )
                for i in self.ids
            ),
        )


@pytest.fixture
def case(tmp_path: Path) -> GoldenCase:
    request = GenerationRequest(prompt="what?", images=[Image.new("RGB", (4, 4), "red")])
    save_request(request, tmp_path / "red.json")
    (found,) = find_cases(tmp_path)
    record_case(CannedPipe(), found)  # type: ignore[arg-type]
    return found


def _check(case: GoldenCase, **options: Any) -> str:
    return "\n".join(check_case(CannedPipe(**options), case))  # type: ignore[arg-type]


def test_the_same_answer_passes(case: GoldenCase) -> None:
    assert _check(case) == ""


def test_the_first_differing_token_is_shown_with_both_sides(case: GoldenCase) -> None:
    shown = _check(case, ids=(7, 5, 9))
    assert "first differing token: number 1" in shown
    assert "recorded  't8' (id 8, -0.2500); likeliest: 't8' -0.2500, 'other' -5.0000" in shown
    assert "now       't5' (id 5" in shown
    assert "recorded text  '789'" in shown


def test_a_shorter_and_a_longer_answer_differ(case: GoldenCase) -> None:
    assert "ended after 2 tokens" in _check(case, ids=(7, 8))
    assert "ended after 3 tokens" in _check(case, ids=(7, 8, 9, 9))


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"text": "else"}, "same tokens, other text: recorded '789', now 'else'"),
        ({"finish": "length"}, "finish reason: recorded 'stop', now 'length'"),
        ({"length": 2}, "placeholder ranges: recorded ['1+3 (3 rows)'], now ['1+2 (2 rows)']"),
        ({"logprob": -0.26}, "log-probability of token 0 moved by 0.01, allowed 0.001"),
    ],
)
def test_every_recorded_thing_counts(case: GoldenCase, change: dict[str, Any], shown: str) -> None:
    assert shown in _check(case, **change)


def test_the_tolerance_is_the_callers(case: GoldenCase) -> None:
    pipe = CannedPipe(logprob=-0.26)
    assert check_case(pipe, case, tolerance=0.02) == []  # type: ignore[arg-type]


def test_versions_are_shown_beside_a_difference_only(case: GoldenCase) -> None:
    record = json.loads(case.record_file.read_text())
    record["versions"]["torch"] = "0.1"
    case.record_file.write_text(json.dumps(record))
    assert _check(case) == ""
    assert "recorded with" in _check(case, ids=(1, 2, 3))


def test_another_dtype_a_missing_and_a_broken_record_are_errors(case: GoldenCase) -> None:
    with pytest.raises(FixtureError, match="recorded in float32, this pipeline runs in bfloat16"):
        _check(case, dtype="bfloat16")
    case.record_file.write_text("{")
    with pytest.raises(FixtureError, match=r"red\.golden\.json"):
        _check(case)
    case.record_file.unlink()
    with pytest.raises(FixtureError, match="has no record yet"):
        _check(case)


def test_a_folder_without_cases_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FixtureError, match="there is no fixture folder"):
        find_cases(tmp_path / "missing")
    with pytest.raises(FixtureError, match="holds no request"):
        find_cases(tmp_path)
    (tmp_path / "bad.json").write_text('{"promt": "x"}')
    with pytest.raises(FixtureError, match=r"bad\.json: .*unknown field 'promt'"):
        load_request(tmp_path / "bad.json")


def test_saved_requests_hold_their_pictures_beside_them(tmp_path: Path) -> None:
    picture = Image.new("RGB", (3, 2), "blue")
    messages = [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "?"}]}]
    file = save_request(GenerationRequest(messages=messages), tmp_path / "deep" / "chat.json")
    assert "chat-1.png" in file.read_text()
    loaded = load_request(file)
    assert loaded.messages is not None
    part = loaded.messages[0].content[0]
    with Image.open(part.image.source) as saved:  # type: ignore[union-attr]
        assert saved.tobytes() == picture.tobytes()


def test_logprobs_are_asked_for_even_if_the_request_does_not(case: GoldenCase) -> None:
    pipe = CannedPipe()
    check_case(pipe, case)  # type: ignore[arg-type]
    assert pipe.asked[0].sampling.logprobs == 5


def test_one_line_makes_one_test_a_case(case: GoldenCase, monkeypatch: pytest.MonkeyPatch) -> None:
    import mmserve.pipeline

    closed: list[bool] = []

    class Pipe(CannedPipe):
        def __init__(self, model: str | None, **options: Any) -> None:
            assert (model, options) == ("m", {"dtype": "float32"})
            super().__init__(ids=(7, 8, 1))

        def close(self) -> None:
            closed.append(True)

    monkeypatch.setattr(mmserve.pipeline, "MMPipeline", Pipe)
    test = golden_test(case.request_file.parent, model="m", dtype="float32")
    (mark,) = test.pytestmark  # type: ignore[attr-defined]
    assert mark.kwargs["ids"] == ["red"]
    finalizers: list[Any] = []
    module = SimpleNamespace(addfinalizer=finalizers.append)
    request = SimpleNamespace(node=SimpleNamespace(getparent=lambda _: module))
    with pytest.raises(pytest.fail.Exception, match="first differing token: number 2"):
        test(case, request)
    (finalizer,) = finalizers
    finalizer()
    assert closed == [True]
