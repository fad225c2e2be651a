"""docs/supported-models.md as it is written: one place for each outcome."""

from __future__ import annotations

from mmserve.conformance.compare import Result
from mmserve.conformance.report import report


def test_each_outcome_stands_in_its_own_section() -> None:
    packed = Result("smolvlm", "paged", "agrees", "text, one image", 2e-5)
    alone = Result("mllama", "generate", "it has cross attention", "text, one image", 0.0)
    failed = Result("idefics3", "", "", "text, one image", None, "ConformanceError: prompt 2: other ids")
    text = Result("llama", "", "", "text", None, "ModelLoadError: no weights")
    page = report([packed, alone, failed, text])

    assert "1 run in packed batches, 1 run through `generate()` itself" in page
    sections = {part.split("\n", 1)[0]: part for part in page.split("\n## ")}
    assert "| smolvlm | text, one image | equal, 2e-05 |" in sections["Packed batches over the paged cache"]
    assert "`generate()`: it has cross attention" in sections["Through `generate()`, one request at a time"]
    broken = sections["Not equal, or not loaded"]
    assert "| idefics3 | text, one image | ConformanceError: prompt 2: other ids |" in broken
    assert "| llama | text | ModelLoadError: no weights |  |" in sections["Language models without images"]


def test_no_section_for_failures_without_any() -> None:
    assert "Not equal" not in report([Result("smolvlm", "paged", "", "text", 1e-6)])
