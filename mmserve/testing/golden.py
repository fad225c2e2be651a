"""Golden fixtures: a request, what a model answered to it once, and whether it still does.

A folder of fixtures holds, for each case::

    two-shapes.json          a GenerationRequest; image paths are relative to this file
    two-shapes.png           its images, under whatever names the request gives
    two-shapes.golden.json   a GoldenRecord, written by `record`

In a test module, one line checks them all::

    test_golden = golden_test("fixtures/golden", model="path/to/model")
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from mmserve.errors import FixtureError, InvalidRequestError
from mmserve.schema import Int, Schema
from mmserve.types import (
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    ImageInput,
    ImagePart,
    Message,
    TokenLogprobs,
)

if TYPE_CHECKING:
    from mmserve.pipeline import MMPipeline

__all__ = ["GoldenCase", "GoldenRecord", "check_case", "find_cases", "golden_test", "record_case", "save_request"]

_SUFFIX = ".golden.json"
_TOP_LOGPROBS = 5
_TOLERANCE = {"float32": 1e-3}
_LOOSE_TOLERANCE = 0.1
"""Largest difference of a log-probability that passes, by the model's dtype; loose for the half-width ones."""


class GoldenRange(Schema):
    """A placeholder range: `embeds` of its `length` tokens take a feature row."""

    offset: Int
    length: Int
    embeds: Int


class GoldenRecord(Schema):
    """What a model answered, and with what it was recorded."""

    token_ids: tuple[Int, ...]
    text: str
    finish_reason: FinishReason
    prompt_tokens: Int
    placeholder_ranges: tuple[GoldenRange, ...]
    logprobs: tuple[TokenLogprobs, ...]
    dtype: str
    versions: dict[str, str] = Field(description="Of the packages used; shown beside a difference, never compared.")


@dataclass(frozen=True, slots=True)
class GoldenCase:
    """One case: the files of its request and of its record."""

    name: str
    request_file: Path
    record_file: Path


def find_cases(folder: str | Path) -> list[GoldenCase]:
    """The cases in `folder`, by name.

    Raises:
        FixtureError: There is no such folder, or no request in it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FixtureError(f"there is no fixture folder {str(folder)!r}")
    files = sorted(path for path in folder.glob("*.json") if not path.name.endswith(_SUFFIX))
    if not files:
        raise FixtureError(f"{str(folder)!r} holds no request: put a GenerationRequest as NAME.json there")
    return [GoldenCase(path.stem, path, path.with_name(path.stem + _SUFFIX)) for path in files]


def save_request(request: GenerationRequest, file: str | Path) -> Path:
    """Write `request` as JSON to `file`, and its pictures as lossless PNG beside it; URLs stay as they are.

    Raises:
        FixtureError: A picture can not be read, or a file not written.
    """
    from processors import ProcessorError, load_image

    file = Path(file)
    count = 0

    def beside(image: ImageInput) -> ImageInput:
        nonlocal count
        if isinstance(image.source, str) and image.source.startswith(("http://", "https://")):
            return image
        count += 1
        picture = file.with_name(f"{file.stem}-{count}.png")
        try:
            load_image(image.source).save(picture)
        except (ProcessorError, OSError) as error:
            raise FixtureError(f"image {count} of {file.name} can not be saved: {error}") from error
        return ImageInput(source=picture.name, uuid=image.uuid)

    _make_folder(file.parent)
    request = _map_images(request, beside)
    fields = request.model_dump(mode="json", exclude_defaults=True)
    if request.messages is not None:  # a part's type is a default, and is what tells the parts apart
        fields["messages"] = [message.model_dump(mode="json", exclude_none=True) for message in request.messages]
    _write(file, json.dumps(fields, indent=2, ensure_ascii=False) + "\n")
    return file


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FixtureError(f"the folder {str(folder)!r} can not be made: {error}") from error


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FixtureError(f"{str(file)!r} can not be written: {error}") from error


def load_request(file: Path) -> GenerationRequest:
    """The request in `file`, its relative image paths made absolute."""
    try:
        request = GenerationRequest.model_validate_json(file.read_bytes())
    except (OSError, InvalidRequestError) as error:
        raise FixtureError(f"{file}: {error}") from error

    def absolute(image: ImageInput) -> ImageInput:
        source = str(image.source)
        if source.startswith(("http://", "https://", "data:")):
            return image
        return ImageInput(source=str(file.parent / source), uuid=image.uuid)

    return _map_images(request, absolute)


def _map_images(request: GenerationRequest, change: Callable[[ImageInput], ImageInput]) -> GenerationRequest:
    """A copy of `request` with every image, in the prompt or in a message, replaced by `change(image)`."""

    def changed(message: Message) -> Message:
        if isinstance(message.content, str):
            return message
        parts = [ImagePart(image=change(p.image)) if isinstance(p, ImagePart) else p for p in message.content]
        return Message(role=message.role, content=parts)

    update: dict[str, Any] = {"images": tuple(change(image) for image in request.images)}
    if request.messages is not None:
        update["messages"] = tuple(changed(message) for message in request.messages)
    return request.model_copy(update=update)


def record_case(pipe: MMPipeline, case: GoldenCase) -> GoldenRecord:
    """Run the case's request and write what came out as its record.

    Raises:
        FixtureError: The request can not be read, or the record not written.
    """
    record = _run(pipe, case)
    _write(case.record_file, record.model_dump_json(indent=2) + "\n")
    return record


def check_case(pipe: MMPipeline, case: GoldenCase, tolerance: float | None = None) -> list[str]:
    """Run the case's request again and compare.

    Args:
        tolerance: Largest difference of a log-probability; None: 1e-3 in float32, 0.1 in other dtypes.

    Returns:
        One readable entry a difference; empty if all agrees.

    Raises:
        FixtureError: There is no record, it can not be read, or it was made in another dtype.
    """
    recorded = _read_record(case)
    dtype = str(pipe.describe()["dtype"])
    if recorded.dtype != dtype:
        raise FixtureError(f"{case.name} was recorded in {recorded.dtype}, this pipeline runs in {dtype}: use the same")
    now = _run(pipe, case)
    allowed = tolerance if tolerance is not None else _TOLERANCE.get(dtype, _LOOSE_TOLERANCE)
    differences = [*_prompt_differences(recorded, now), *_token_differences(recorded, now, allowed)]
    if differences and recorded.versions != now.versions:
        differences.append(f"versions: recorded with {_versions_text(recorded)}, now {_versions_text(now)}")
    return differences


def golden_test(folder: str | Path, model: str | Path | None = None, **options: Any) -> Callable[..., None]:
    """A pytest function that checks every case of `folder`, one test a case.

    Args:
        folder: The fixtures. model, options: As for `MMPipeline`; one pipeline serves all cases.
    """
    import pytest

    cases = find_cases(folder)
    opened: list[MMPipeline] = []

    @pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])
    def test_golden(case: GoldenCase, request: pytest.FixtureRequest) -> None:
        if not opened:
            from mmserve.pipeline import MMPipeline

            opened.append(MMPipeline(model, **options))
            module = request.node.getparent(pytest.Module)
            module.addfinalizer(lambda: opened.pop().close())
        differences = check_case(opened[0], case)
        if differences:
            pytest.fail(f"{case.name}\n" + "\n".join(differences), pytrace=False)

    return test_golden


def _run(pipe: MMPipeline, case: GoldenCase) -> GoldenRecord:
    request = load_request(case.request_file)
    if request.sampling.logprobs is None:
        sampling = request.sampling.model_copy(update={"logprobs": _TOP_LOGPROBS})
        request = request.model_copy(update={"sampling": sampling})
    prompt = pipe.prepare(request)
    output = pipe.generate(request)
    return GoldenRecord(
        token_ids=output.token_ids,
        text=output.text,
        finish_reason=output.finish_reason,
        prompt_tokens=len(prompt.token_ids),
        placeholder_ranges=tuple(
            GoldenRange(offset=i.range.offset, length=i.range.length, embeds=i.range.num_embeds) for i in prompt.images
        ),
        logprobs=_rounded(output),
        dtype=str(pipe.describe()["dtype"]),
        versions=_versions(),
    )


def _rounded(output: GenerationOutput) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities to five places, so that a record made again on the same machine is the same file."""

    def entry(logprobs: TokenLogprobs) -> TokenLogprobs:
        tokens = [t.model_copy(update={"logprob": round(t.logprob, 5)}) for t in (logprobs.chosen, *logprobs.top)]
        return TokenLogprobs(chosen=tokens[0], top=tuple(tokens[1:]))

    return tuple(entry(logprobs) for logprobs in output.logprobs or ())


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    packages = ("torch", "transformers", "pillow")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def _versions_text(record: GoldenRecord) -> str:
    return ", ".join(f"{name} {number}" for name, number in record.versions.items())


def _read_record(case: GoldenCase) -> GoldenRecord:
    if not case.record_file.is_file():
        raise FixtureError(f"{case.name} has no record yet: `mmserve fixtures record {case.record_file.parent}`")
    try:
        record = GoldenRecord.model_validate_json(case.record_file.read_bytes())
    except (OSError, InvalidRequestError) as error:
        raise FixtureError(f"{case.record_file}: {error}") from error
    if len(record.logprobs) != len(record.token_ids):
        raise FixtureError(
            f"{case.record_file} has {len(record.logprobs)} log-probabilities for {len(record.token_ids)} tokens: "
            "record it again"
        )
    return record


def _prompt_differences(recorded: GoldenRecord, now: GoldenRecord) -> list[str]:
    differences = []
    if recorded.prompt_tokens != now.prompt_tokens:
        differences.append(f"prompt tokens: recorded {recorded.prompt_tokens}, now {now.prompt_tokens}")
    if recorded.placeholder_ranges != now.placeholder_ranges:
        sides = [
            [f"{r.offset}+{r.length} ({r.embeds} rows)" for r in side.placeholder_ranges] for side in (recorded, now)
        ]
        differences.append(f"placeholder ranges: recorded {sides[0]}, now {sides[1]}")
    return differences


def _token_differences(recorded: GoldenRecord, now: GoldenRecord, tolerance: float) -> list[str]:
    """The first differing token with both sides' alternatives, or else the worst log-probability."""
    first = _first_difference(recorded.token_ids, now.token_ids)
    if first is not None:
        return [
            f"first differing token: number {first}",
            f"  recorded  {_token_text(recorded, first)}",
            f"  now       {_token_text(now, first)}",
            f"  recorded text  {recorded.text!r}",
            f"  text now       {now.text!r}",
        ]
    differences = []
    if recorded.text != now.text:
        differences.append(f"same tokens, other text: recorded {recorded.text!r}, now {now.text!r}")
    if recorded.finish_reason != now.finish_reason:
        differences.append(f"finish reason: recorded {recorded.finish_reason!r}, now {now.finish_reason!r}")
    pairs = zip(recorded.logprobs, now.logprobs, strict=True)
    gaps = [abs(old.chosen.logprob - new.chosen.logprob) for old, new in pairs]
    if gaps and max(gaps) > tolerance:
        worst = gaps.index(max(gaps))
        differences += [
            f"log-probability of token {worst} moved by {gaps[worst]:.2g}, allowed {tolerance:g}",
            f"  recorded  {_token_text(recorded, worst)}",
            f"  now       {_token_text(now, worst)}",
        ]
    return differences


def _first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def _token_text(record: GoldenRecord, index: int) -> str:
    if index >= len(record.token_ids):
        return f"ended after {len(record.token_ids)} tokens"
    entry = record.logprobs[index]
    top = ", ".join(f"{token.text!r} {token.logprob:.4f}" for token in entry.top)
    return f"{entry.chosen.text!r} (id {entry.chosen.token_id}, {entry.chosen.logprob:.4f}); likeliest: {top}"
