"""`mmserve conformance`: the packed path against transformers' own `generate()`, on tiny models or on one of yours."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from mmserve.conformance.compare import Result

__all__ = ["conformance"]


@click.command()
@click.option("--family", "families", multiple=True, metavar="NAME", help="A family's tiny model; repeat for several.")
@click.option("--model", default=None, metavar="DIR", help="A model folder or hub id of yours, instead.")
@click.option("--new-tokens", type=click.IntRange(1), default=32, show_default=True, help="Tokens to generate.")
@click.option("--short", is_flag=True, help="One form of batching that has everything in it, instead of all.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a model.")
def conformance(families: tuple[str, ...], model: str | None, new_tokens: int, short: bool, as_json: bool) -> None:
    """Compare packed batches with generate(): equal ids, log-probabilities within 1e-4, in float32 on the CPU.

    Without --family and --model all families of a source checkout are compared, and its docs/supported-models.md is
    written. The exit status is 1 if anything differs.
    """
    from mmserve.conformance.families import checkout
    from mmserve.conformance.report import report

    if model is not None and families:
        raise click.UsageError("--model and --family exclude each other")
    results = []
    for result in _run(families, model, new_tokens, short):
        results.append(result)
        click.echo(json.dumps(asdict(result)) if as_json else _line(result))
    root = checkout()
    if root is not None and model is None and not families and not short:
        path = root / "docs" / "supported-models.md"
        path.write_text(report(results), encoding="utf-8")
        click.echo(f"wrote {path}", err=True)
    sys.exit(int(any(result.failure for result in results)))


def _run(families: tuple[str, ...], model: str | None, new_tokens: int, short: bool) -> Iterator[Result]:
    from mmserve.conformance.compare import FORMS, SHORT, run_subject
    from mmserve.conformance.families import family_names, family_subject, known_families

    forms = SHORT if short else FORMS
    if model is not None:
        from mmserve.assembly import resolve_folder
        from mmserve.conformance.folder import folder_subject

        yield run_subject(folder_subject(resolve_folder(model)), new_tokens=new_tokens, forms=forms)
        return
    for name in known_families(families) or family_names():
        with tempfile.TemporaryDirectory() as folder:
            yield run_subject(family_subject(name, Path(folder)), new_tokens=new_tokens, forms=forms)


def _line(result: Result) -> str:
    outcome = result.failure or f"equal, largest difference {result.worst:.1e}"
    return f"{result.name:24} {result.path:9} {result.compared}: {outcome}"
