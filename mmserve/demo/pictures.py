"""Draws the demo's pictures: coloured shapes at nine places, or a few characters."""

from __future__ import annotations

import math
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

__all__ = ["COLOURS", "PLACES", "SHAPES", "Shape", "draw_shapes", "draw_text"]

COLOURS = {
    "red": (214, 39, 40),
    "green": (34, 150, 60),
    "blue": (31, 90, 200),
    "yellow": (250, 214, 40),
    "purple": (130, 50, 160),
    "orange": (250, 135, 20),
}
PLACES = {
    f"{row} {column}".strip() or "center": (x, y)
    for y, row in enumerate(("top", "", "bottom"))
    for x, column in enumerate(("left", "", "right"))
}
"""Name -> (column, row) of the three-by-three grid."""

_SUPERSAMPLING = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """One object: its kind, colour and place by name, and its size as a share of its cell's shorter side."""

    kind: str
    colour: str
    place: str
    size: float = 0.7


def draw_shapes(
    shapes: tuple[Shape, ...], width: int = 240, height: int = 240, background: str = "white"
) -> Image.Image:
    """An RGB picture of `shapes`, anti-aliased."""
    canvas = Image.new("RGB", (width * _SUPERSAMPLING, height * _SUPERSAMPLING), background)
    pen = ImageDraw.Draw(canvas)
    cell = canvas.width / 3, canvas.height / 3
    for shape in shapes:
        column, row = PLACES[shape.place]
        centre = (column + 0.5) * cell[0], (row + 0.5) * cell[1]
        SHAPES[shape.kind](pen, centre, shape.size * min(cell) / 2, COLOURS[shape.colour])
    return canvas.resize((width, height), Image.Resampling.LANCZOS)


def draw_text(text: str, colour: str = "black", height: int = 40, size: tuple[int, int] = (240, 120)) -> Image.Image:
    """An RGB picture with `text` in its middle, in Pillow's own font, `height` pixels high."""
    picture = Image.new("RGB", size, "white")
    fill = COLOURS.get(colour, colour)
    font = ImageFont.load_default(height)
    ImageDraw.Draw(picture).text((size[0] / 2, size[1] / 2), text, font=font, fill=fill, anchor="mm")
    return picture


Point = tuple[float, float]
Colour = tuple[int, int, int]


def _circle(pen: ImageDraw.ImageDraw, centre: Point, radius: float, colour: Colour) -> None:
    pen.ellipse(_box(centre, radius, radius), fill=colour)


def _square(pen: ImageDraw.ImageDraw, centre: Point, radius: float, colour: Colour) -> None:
    side = 0.88 * radius
    pen.rectangle(_box(centre, side, side), fill=colour)


def _triangle(pen: ImageDraw.ImageDraw, centre: Point, radius: float, colour: Colour) -> None:
    pen.polygon(_corners(centre, (radius,) * 3), fill=colour)


def _star(pen: ImageDraw.ImageDraw, centre: Point, radius: float, colour: Colour) -> None:
    pen.polygon(_corners(centre, (radius, 0.42 * radius) * 5), fill=colour)


def _cross(pen: ImageDraw.ImageDraw, centre: Point, radius: float, colour: Colour) -> None:
    arm = 0.32 * radius
    pen.rectangle(_box(centre, radius, arm), fill=colour)
    pen.rectangle(_box(centre, arm, radius), fill=colour)


SHAPES = {"circle": _circle, "square": _square, "triangle": _triangle, "star": _star, "cross": _cross}
"""Name -> function that draws it."""


def _box(centre: Point, half_width: float, half_height: float) -> tuple[float, float, float, float]:
    x, y = centre
    return x - half_width, y - half_height, x + half_width, y + half_height


def _corners(centre: Point, radii: tuple[float, ...]) -> list[Point]:
    """Corners at equal angles, clockwise from the top, each at its own distance from the centre."""
    x, y = centre
    turn = 2 * math.pi / len(radii)
    return [(x + r * math.sin(i * turn), y - r * math.cos(i * turn)) for i, r in enumerate(radii)]
