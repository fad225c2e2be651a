"""`mmserve fixtures record` and `mmserve fixtures check`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from mmserve.cli.options import PATH, model_options, open_pipeline

__all__ = ["fixtures"]

_FOLDER = click.argument("folder", type=PATH)


@click.group()
def fixtures() -> None:
    """Golden fixtures: record what a model answers, and check that it still does."""


@fixtures.command()
@_FOLDER
@model_options
def record(folder: Path, **model: str | None) -> None:
    """Run every request (NAME.json) of FOLDER and write NAME.golden.json beside it."""
    from mmserve.testing.golden import find_cases, record_case

    cases = find_cases(folder)
    with open_pipeline(**model) as pipe:  # type: ignore[arg-type]
        for case in cases:
            written = record_case(pipe, case)
            click.echo(f"recorded  {case.name}: {written.text!r}")


@fixtures.command()
@_FOLDER
@click.option("--tolerance", type=float, default=None, help="Of log-probabilities; default by dtype.")
@model_options
def check(folder: Path, tolerance: float | None, **model: str | None) -> None:
    """Run every request of FOLDER again and compare; exit status 1 if any differs."""
    from mmserve.testing.golden import check_case, find_cases

    cases = find_cases(folder)
    failed = 0
    with open_pipeline(**model) as pipe:  # type: ignore[arg-type]
        for case in cases:
            differences = check_case(pipe, case, tolerance)
            failed += bool(differences)
            click.echo(f"{'differs ' if differences else 'same    '}  {case.name}")
            for line in differences:
                click.echo(f"    {line}")
    click.echo(f"{len(cases) - failed} of {len(cases)} as recorded")
    if failed:
        sys.exit(1)
