"""The demo from beginning to end: draw, ask, stream, save."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mmserve.demo.scenes import Scene, demo_scenes
from mmserve.demo.sheet import Answered, SheetRow, draw_sheet
from mmserve.pipeline import MMPipeline

__all__ = ["run_demo"]


def run_demo(pipe: MMPipeline, out: Path, write: Callable[[str], None]) -> Path:
    """Ask `pipe` every question of the demo, pass the text on to `write` as it comes, and save one sheet.

    Returns:
        The sheet's path; the pictures lie beside it.
    """
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, scene in enumerate(demo_scenes(), start=1):
        names = _save_pictures(scene, number, out)
        write(f"\n{', '.join(names)}\n")
        rows.append(SheetRow(scene.pictures, tuple(_ask(pipe, scene, question, write) for question in scene.questions)))
    sheet = out / "sheet.png"
    draw_sheet(tuple(rows), title="mmserve demo: a small trained model, on this machine").save(sheet)
    return sheet


def _save_pictures(scene: Scene, number: int, out: Path) -> list[str]:
    names = []
    for letter, picture in zip("abc", scene.pictures, strict=False):
        name = f"picture-{number}{letter if len(scene.pictures) > 1 else ''}.png"
        picture.save(out / name)
        names.append(name)
    return names


def _ask(pipe: MMPipeline, scene: Scene, question: str, write: Callable[[str], None]) -> Answered:
    write(f"  {question}  ")
    text, seconds = "", 0.0
    for delta in pipe.stream(scene.pictures, question):
        write(delta.text)
        text += delta.text
        if delta.output is not None:
            seconds = delta.output.metrics.total
    write(f"  ({seconds * 1000:.0f} ms)\n")
    return Answered(question, text, seconds)
