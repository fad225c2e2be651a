"""`mmserve inspect`: what the model sees of a prompt, as a picture, a table, or JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mmserve.cli.options import PATH

if TYPE_CHECKING:
    from mmserve.inspect.view import PromptView

__all__ = ["inspect"]


@click.command()
@click.option("--image", "images", multiple=True, metavar="FILE|URL", help="A picture; repeat for several.")
@click.option("--prompt", default="", help="The question.")
@click.option("--raw", is_flag=True, help="Take the prompt verbatim, without the chat template.")
@click.option("--model", default=None, metavar="DIR", help="Model folder or hub id; default: the demo model.")
@click.option("--revision", default=None, help="Branch, tag or commit of a hub model.")
@click.option("--out", type=PATH, default=None, help="Save the sheet (PNG) here.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
def inspect(
    images: tuple[str, ...],
    prompt: str,
    raw: bool,
    model: str | None,
    revision: str | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Show how images are cut and where their tokens stand. Loads the processor only, not the model."""
    from mmserve.assembly import load_processor, process_request, resolve_folder
    from mmserve.config import EngineConfig
    from mmserve.inspect.sheet import draw_view
    from mmserve.inspect.view import view_prompt
    from mmserve.types import GenerationRequest, ImageInput

    request = GenerationRequest(prompt=prompt, images=tuple(ImageInput(source=image) for image in images), raw=raw)
    processor = load_processor(resolve_folder(model, revision), EngineConfig())
    view = view_prompt(processor, process_request(processor, request))
    if out is not None:
        draw_view(view).save(out, format="PNG")
    click.echo(json.dumps(view.as_json()) if as_json else _table(view))
    if out is not None:
        click.echo(f"sheet: {out.resolve()}", err=True)


def _table(view: PromptView) -> str:
    from mmserve.bench.report import table

    counts = {
        kind: sum(token.kind == kind for token in view.tokens) for kind in ("text", "special", "image", "structure")
    }
    lines = [f"{len(view.tokens)} tokens: " + ", ".join(f"{count} {kind}" for kind, count in counts.items())]
    rows = []
    for image in view.images:
        last = image.offset + image.length - 1
        rows.append((f"image {image.number}", _size(image.size), f"{image.offset} to {last}", str(image.num_embeds)))
        for number, tile in enumerate(image.tiles, start=1):
            span = "" if tile.first_token is None else f"{tile.first_token} to {tile.last_token}"
            rows.append((f"  tile {number}", _size(tile.picture.size), span, ""))
    if rows:
        lines += ["", table(("", "size", "tokens", "rows"), rows)]
    return "\n".join(lines)


def _size(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"
