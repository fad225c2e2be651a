"""`mmserve generate`, `mmserve describe` and `mmserve demo`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from mmserve.cli.options import PATH, model_options, open_pipeline

__all__ = ["demo", "describe", "generate"]


@click.command()
@click.option("--image", "images", multiple=True, metavar="FILE|URL", help="A picture; repeat for several.")
@click.option("--prompt", required=True, help="The question.")
@click.option("--max-tokens", type=int, default=None, help="Most tokens to generate.")
@click.option("--temperature", type=float, default=None, help="0 is greedy; default: the model's own.")
@click.option("--seed", type=int, default=None, help="For the same sampled answer each time.")
@click.option("--raw", is_flag=True, help="Take the prompt verbatim, without the chat template.")
@click.option("--json", "as_json", is_flag=True, help="Print the whole output as one JSON object.")
@click.option("--stream", is_flag=True, help="Print the text as it comes.")
@model_options
def generate(
    images: tuple[str, ...],
    prompt: str,
    max_tokens: int | None,
    temperature: float | None,
    seed: int | None,
    raw: bool,
    as_json: bool,
    stream: bool,
    **model: str | None,
) -> None:
    """Ask one question about no, one or several pictures."""
    from mmserve.types import GenerationRequest, ImageInput, SamplingParams

    if stream and as_json:
        raise click.UsageError("--stream prints text and --json an object: choose one")
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    pictures = tuple(ImageInput(source=image) for image in images)
    request = GenerationRequest(prompt=prompt, images=pictures, raw=raw, sampling=sampling)
    with open_pipeline(**model) as pipe:  # type: ignore[arg-type]
        if stream:
            for delta in pipe.stream(request):
                click.echo(delta.text, nl=False)
            click.echo()
            return
        output = pipe.generate(request)
    click.echo(output.model_dump_json(indent=2) if as_json else output.text)


@click.command()
@model_options
def describe(**model: str | None) -> None:
    """Say what is loaded, which paths were chosen and why, as JSON."""
    with open_pipeline(**model) as pipe:  # type: ignore[arg-type]
        click.echo(json.dumps(pipe.describe(), indent=2))


@click.command()
@click.option("--out", type=PATH, default=Path("demo-out"), show_default=True, help="Folder.")
@model_options
def demo(out: Path, **model: str | None) -> None:
    """Draw a few pictures, ask about them, and save one sheet with pictures, questions, answers and times."""
    from mmserve.demo.run import run_demo

    with open_pipeline(**model) as pipe:  # type: ignore[arg-type]
        sheet = run_demo(pipe, out, lambda text: click.echo(text, nl=False))
    click.echo(f"\nsheet: {sheet.resolve()}")
