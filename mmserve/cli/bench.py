"""`mmserve bench compare | offline | attention | processors | ...`: each ends in one line of JSON."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from mmserve.cli.options import PATH

__all__ = ["bench"]

_SHAPE = "smolvlm-256m"
_MODEL = click.option("--model", type=PATH, default=None, metavar="DIR", help="Model folder.")


def _say(text: str) -> None:
    click.echo(text, err=True)


@click.group()
def bench() -> None:
    """Measure this machine: against transformers, backend against backend, and the engine's own cost."""


@bench.command()
@_MODEL
@click.option("--shape", default=_SHAPE, show_default=True, help="Without --model: random weights in this shape.")
@click.option("--dtype", default="auto", show_default=True)
@click.option("--only", multiple=True, help="Name of one figure; repeat for several. Default: all.")
@click.option(
    "--repeats", type=click.IntRange(1), default=3, show_default=True, help="Runs of a figure; the best counts."
)
@click.option("--plot", type=PATH, default=None, help="Save a PNG of the ratios here.")
def compare(model: Path | None, shape: str, dtype: str, only: tuple[str, ...], repeats: int, plot: Path | None) -> None:
    """This engine against transformers' generate(), same model, same tokens, in one run."""
    from mmserve.bench.compare import Workload, render, run
    from mmserve.bench.shapes import build_shape

    with tempfile.TemporaryDirectory() as scratch:
        folder = model if model is not None else build_shape(shape, Path(scratch) / shape)
        result = run(folder, dtype=dtype, workload=Workload(repeats=repeats), only=only, say=_say)
    click.echo(render(result, plot))


@bench.command()
@click.option("--model", default=None, metavar="DIR", help="Model folder or hub id. Default: the demo model.")
@click.option("--dtype", default="auto", show_default=True)
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda.")
@click.option("--tokens", type=click.IntRange(1), default=32, show_default=True, help="To generate, a request.")
@click.option(
    "--at-once",
    type=click.IntRange(1),
    multiple=True,
    default=(1, 8, 32),
    show_default=True,
    help="Requests handed in together; repeat for several cases.",
)
@click.option(
    "--repeats", type=click.IntRange(1), default=2, show_default=True, help="Runs of a case; the best counts."
)
def offline(model: str | None, dtype: str, device: str, tokens: int, at_once: tuple[int, ...], repeats: int) -> None:
    """Requests per second and time to first token, pictures never seen (cold) and seen before (warm)."""
    from mmserve.bench.offline import Workload, render, run

    workload = Workload(tokens=tokens, at_once=at_once, repeats=repeats)
    click.echo(render(run(model, dtype=dtype, device=device, workload=workload, say=_say)))


@bench.command()
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda.")
def attention(device: str) -> None:
    """Every attention backend and mask against float64, then timed against SDPA and the memory bandwidth."""
    from mmserve.bench.attention import render, run

    click.echo(render(run(device, say=_say)))


@bench.command()
@_MODEL
@click.option("--images", type=click.IntRange(1), default=16, show_default=True)
def processors(model: Path | None, images: int) -> None:
    """Pictures per second of the processor layer against the bare Hugging Face processor."""
    from mmserve.bench.processors import render, run
    from mmserve.demo import demo_model_folder

    click.echo(render(run(model or demo_model_folder(), num_images=images)))


@bench.command()
@click.option("--sequences", type=click.IntRange(1), default=256, show_default=True)
def scheduler(sequences: int) -> None:
    """Host time of a step apart from the model, and of the block pool."""
    from mmserve.bench.report import json_line
    from mmserve.bench.scheduler import run

    click.echo(json_line(run(num_seqs=sequences)))


@bench.command()
@_MODEL
@click.option("--shape", default=_SHAPE, show_default=True, help="Without --model: random weights in this shape.")
@click.option("--dtype", default="auto", show_default=True)
def loading(model: Path | None, shape: str, dtype: str) -> None:
    """The peak of memory while a model is loaded, against the model's own size."""
    from mmserve.bench.loading import render, run
    from mmserve.bench.shapes import build_shape

    with tempfile.TemporaryDirectory() as scratch:
        folder = model if model is not None else build_shape(shape, Path(scratch) / shape)
        click.echo(render(run(folder, dtype=dtype)))


@bench.command()
@_MODEL
@click.option("--shape", default=_SHAPE, show_default=True, help="Without --model: random weights in this shape.")
@click.option("--dtype", default="auto", show_default=True)
@click.option("--requests", type=click.IntRange(1), default=8, show_default=True, help="At once, a new picture each.")
@click.option("--tokens", type=click.IntRange(1), default=16, show_default=True, help="To generate, a request.")
@click.option("--cache", type=click.IntRange(1), default=256, show_default=True, help="MiB for keys and values.")
def memory(model: Path | None, shape: str, dtype: str, requests: int, tokens: int, cache: int) -> None:
    """The peak of memory while requests are answered, against the weights and the cache that was asked for."""
    from mmserve.bench.apart import MiB
    from mmserve.bench.memory import Workload, render, run
    from mmserve.bench.shapes import build_shape

    with tempfile.TemporaryDirectory() as scratch:
        folder = model if model is not None else build_shape(shape, Path(scratch) / shape)
        click.echo(render(run(folder, dtype=dtype, workload=Workload(requests, tokens, cache * MiB))))


@bench.command()
@_MODEL
@click.option("--shape", default=_SHAPE, show_default=True, help="Without --model: random weights in this shape.")
@click.option("--dtype", default="auto", show_default=True)
@click.option("--ranks", type=click.IntRange(2), default=2, show_default=True, help="And threads of the other side.")
@click.option("--sequences", type=click.IntRange(1), default=32, show_default=True, help="Of an exchanged step.")
@click.option("--text-tokens", type=click.IntRange(2), default=1000, show_default=True, help="Of a prompt, about.")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="Turns of a side in prefill.")
def parallel(
    model: Path | None, shape: str, dtype: str, ranks: int, sequences: int, text_tokens: int, repeats: int
) -> None:
    """Several ranks on the CPU: bytes sent, host time of a step's exchange, prefill against one process."""
    from mmserve.bench.parallel import Workload, render, run
    from mmserve.bench.shapes import build_shape

    workload = Workload(ranks=ranks, sequences=sequences, text_tokens=text_tokens, repeats=repeats)
    with tempfile.TemporaryDirectory() as scratch:
        folder = model if model is not None else build_shape(shape, Path(scratch) / shape)
        click.echo(render(run(folder, dtype=dtype, workload=workload, say=_say)))
