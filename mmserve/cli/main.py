"""The command group. Commands import what they run inside their own body, so that `--help` stays light."""

from __future__ import annotations

import sys
from typing import Any

import click

from mmserve import __version__
from mmserve.cli.bench import bench
from mmserve.cli.conformance import conformance
from mmserve.cli.fixtures import fixtures
from mmserve.cli.generate import demo, describe, generate
from mmserve.cli.inspect import inspect
from mmserve.errors import MMServeError

__all__ = ["main"]


class _Group(click.Group):
    """Turns an error of our own tree, or of a file that can not be written, into one line and exit status 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (MMServeError, OSError) as error:
            click.echo(f"mmserve: {error}", err=True)
            sys.exit(1)
        except KeyboardInterrupt:
            click.echo("mmserve: interrupted", err=True)
            sys.exit(130)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mmserve")
def main() -> None:
    """Image+text inference with any transformers vision-language model."""


for command in (demo, generate, describe, inspect, fixtures, bench, conformance):
    main.add_command(command)
