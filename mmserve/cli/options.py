"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from mmserve.pipeline import MMPipeline

__all__ = ["model_options", "open_pipeline"]

CommandT = TypeVar("CommandT", bound=Callable[..., Any])


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
