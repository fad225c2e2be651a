"""docs/supported-models.md: every model type of the image+text mapping, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence

from mmserve.conformance.compare import Result
from mmserve.model.refused import REFUSED

__all__ = ["mapped_types", "report"]

_HEAD = """\
# Supported models

Written by `mmserve conformance`, run in a source checkout. Each line is a tiny random model of the family, in
float32. Its prompts are asked together in packed batches: whole, again on a warm cache, in chunks of 5 tokens (fewer
than an image has), and in chunks of 3 with requests joining late. Each prompt alone goes through transformers'
`generate()` on the same weights. Equal means: 32 new tokens with the same ids, and no log-probability further off than
1e-4; the number is the largest difference that was seen. `mmserve conformance --model DIR` makes the same comparison
with a model of yours.
"""


def mapped_types() -> tuple[str, ...]:
    """The model types of transformers' `AutoModelForImageTextToText`."""
    from transformers import AutoModelForImageTextToText

    return tuple(sorted(AutoModelForImageTextToText._model_mapping._model_mapping))


def report(results: Sequence[Result]) -> str:
    """The document."""
    mapped = set(mapped_types())
    images = [result for result in results if result.name in mapped]
    texts = [result for result in results if result.name not in mapped]
    packed = [result for result in images if result.path == "paged"]
    alone = [result for result in images if result.path == "generate"]
    failed = [result for result in images if result.failure]
    rest = sorted(mapped - {result.name for result in images} - set(REFUSED))
    refused = [name for name in sorted(REFUSED) if name in mapped]
    return "\n".join(
        [
            _HEAD,
            f"Of the {len(mapped)} model types that transformers maps to image+text,",
            f"{len(packed)} run in packed batches, {len(alone)} run through `generate()` itself and were compared,",
            f"{len(refused)} are refused at load, and {len(rest)} run through `generate()` without being compared.",
            "",
            "## Packed batches over the paged cache",
            "",
            *_rows(packed, False),
            "",
            "## Through `generate()`, one request at a time",
            "",
            *_rows(alone, True),
            "",
            *(("## Not equal, or not loaded", "", *_rows(failed, False), "") if failed else ()),
            "## Language models without images",
            "",
            "Others of the causal-LM mapping take the packed path if it agrees with the plain model on a trial text.",
            "",
            *_rows(texts, True),
            "",
            "## Refused at load",
            "",
            "| model type | why |",
            "|---|---|",
            *(f"| {name} | {REFUSED[name]} |" for name in refused),
            *(("", "## Not compared", "", ", ".join(rest) + ".") if rest else ()),
            "",
        ]
    )


def _rows(results: Sequence[Result], with_reason: bool) -> list[str]:
    lines = ["| model type | compared | result |" + (" path |" if with_reason else "")]
    lines.append("|---|---|---|" + ("---|" if with_reason else ""))
    for result in results:
        outcome = result.failure or f"equal, {result.worst:.0e}"
        line = f"| {result.name} | {result.compared} | {outcome} |"
        path = {"paged": "packed", "generate": f"`generate()`: {result.reason}"}.get(result.path, "")
        lines.append(f"{line} {path} |" if with_reason else line)
    return lines
