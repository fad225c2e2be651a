"""What the demo asks."""

from __future__ import annotations

from dataclasses import dataclass

from PIL import Image

from mmserve.demo.pictures import Shape, draw_shapes, draw_text

__all__ = ["Scene", "demo_scenes"]


@dataclass(frozen=True, slots=True)
class Scene:
    """One or more pictures, and the questions about them."""

    pictures: tuple[Image.Image, ...]
    questions: tuple[str, ...]


def demo_scenes() -> tuple[Scene, ...]:
    """The demo's scenes, drawn afresh."""
    shapes = draw_shapes(
        (Shape("star", "yellow", "top left"), Shape("circle", "blue", "right"), Shape("cross", "red", "bottom")),
        background="#dddddd",
    )
    grid = draw_shapes(
        (
            Shape("square", "green", "top", 0.8),
            Shape("triangle", "purple", "left", 0.6),
            Shape("square", "orange", "bottom right"),
            Shape("circle", "green", "center", 0.5),
        ),
        width=300,
        height=200,
    )
    sign = draw_text("CAT42", "blue")
    other = draw_shapes((Shape("triangle", "orange", "center", 0.9),), 160, 160, "black")
    return (
        Scene((shapes,), ("What color is the star?", "Where is the blue circle?", "Describe the image.")),
        Scene((grid,), ("How many squares are there?", "Is there a red triangle?", "What shape is purple?")),
        Scene((sign,), ("What does it say?",)),
        Scene((other, shapes), ("Which image has a cross?", "What does the first image show?")),
    )
