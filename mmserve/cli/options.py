"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from mmserve.pipeline import MMPipeline

__all__ = ["PATH", "model_options", "open_pipeline"]

CommandT = TypeVar("CommandT", bound=Callable[..., Any])


class _PathType(click.Path):
    """A path; one with a NUL character, which no file can have, is a usage error."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if "\0" in str(value):
            self.fail("a path can not hold a NUL character", param, ctx)
        return super().convert(value, param, ctx)


PATH = _PathType(path_type=Path)
"""The type of every path on the command line."""


def model_options(command: CommandT) -> CommandT:
    """--model, --dtype, --device and --revision, passed to the command under those names."""
    for option in (
        click.option("--revision", default=None, help="Branch, tag or commit of a hub model."),
        click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1, ..."),
        click.option(
            "--dtype", default="auto", show_default=True, help="auto (the checkpoint's), float32, bfloat16, ..."
        ),
        click.option("--model", default=None, metavar="DIR", help="Model folder or hub id; default: the demo model."),
    ):
        command = option(command)
    return command


def open_pipeline(model: str | None, dtype: str, device: str, revision: str | None) -> MMPipeline:
    """The pipeline that the shared options ask for."""
    from mmserve.pipeline import MMPipeline

    return MMPipeline(model, dtype=dtype, device=device, revision=revision)
