"""What the documents show works as shown: their Python blocks run in order, and so do their mmserve commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from mmserve import MMPipeline
from mmserve.cli import main

ROOT = Path(__file__).parents[2]
DOCUMENTS = ["README.md", "docs/quickstart.md", "docs/fixtures.md"]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _blocks(document: str, language: str) -> list[str]:
    text = (ROOT / document).read_text(encoding="utf-8")
    return [body for kind, body in _BLOCK.findall(text) if kind == language]


def _commands(document: str) -> list[str]:
    lines = "".join(_blocks(document, "console")).splitlines()
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ mmserve ")]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_blocks_and_commands_run_in_order(document: str, user_folder: Path) -> None:
    blocks = _blocks(document, "python")
    assert blocks
    names: dict[str, object] = {}
    try:
        for number, block in enumerate(blocks):
            if document == "docs/fixtures.md" and "golden_test(" in block:
                _run_commands(document, user_folder)  # the record must be there before the test line is read
            exec(compile(block, f"{document}, Python block {number}", "exec"), names)
    finally:
        pipe = names.get("pipe")
        if isinstance(pipe, MMPipeline):
            pipe.close()
    if document == "docs/fixtures.md":
        assert callable(names["test_golden"])
    else:
        _run_commands(document, user_folder)


def _run_commands(document: str, user_folder: Path) -> None:
    _some_fixtures(user_folder)
    for command in _commands(document):
        result = CliRunner().invoke(main, shlex.split(command)[1:])
        assert result.exit_code == 0, f"{command}\n{result.output}"


def _some_fixtures(user_folder: Path) -> None:
    from mmserve import GenerationRequest
    from mmserve.testing import save_request

    save_request(
        GenerationRequest(prompt="Where is the star?", images=["photo.jpg"]), user_folder / "my-fixtures" / "where.json"
    )


@pytest.mark.parametrize(
    "document", ["README.md", *(f"docs/{file.name}" for file in sorted((ROOT / "docs").glob("*.md")))]
)
def test_links_lead_somewhere(document: str) -> None:
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / document).read_text(encoding="utf-8")):
        if not link.startswith(("http://", "https://")):
            assert ((ROOT / document).parent / link).exists(), f"{document} links to {link}"


def test_the_make_targets_that_the_readme_names_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`?make (\w+)`?", (ROOT / "README.md").read_text(encoding="utf-8")):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
