"""The demo's pictures are what they say, and its sheet shows everything."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from mmserve.demo.pictures import COLOURS, PLACES, SHAPES, Shape, draw_shapes, draw_text
from mmserve.demo.scenes import demo_scenes
from mmserve.demo.sheet import Answered, SheetRow, draw_sheet


def test_the_nine_places_by_name() -> None:
    assert list(PLACES) == [
        "top left", "top", "top right", "left", "center", "right", "bottom left", "bottom", "bottom right",
    ]  # fmt: skip
    assert PLACES["right"] == (2, 1)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("place", ["top left", "center", "bottom"])
def test_a_shape_lies_in_its_cell_in_its_colour(kind: str, place: str) -> None:
    picture = np.asarray(draw_shapes((Shape(kind, "blue", place),), width=180, height=90)).astype(int)
    inked = np.argwhere((picture != 255).any(axis=-1))
    column, row = PLACES[place]
    (top, left), (bottom, right) = inked.min(axis=0), inked.max(axis=0)
    assert row * 30 <= top <= bottom < (row + 1) * 30
    assert column * 60 <= left <= right < (column + 1) * 60
    middle = picture[row * 30 + 15, column * 60 + 30]
    assert tuple(middle) == COLOURS["blue"]


def test_text_is_drawn_in_its_colour_in_the_middle() -> None:
    picture = np.asarray(draw_text("A1", "red", height=40, size=(120, 60))).astype(int)
    inked = np.argwhere(np.abs(picture - COLOURS["red"]).sum(axis=-1) < 30)
    assert abs(inked.mean(axis=0) - (30, 60)).max() < 6


def test_the_sheet_grows_with_its_rows_and_shows_each_picture() -> None:
    scenes = demo_scenes()
    rows = tuple(
        SheetRow(scene.pictures, tuple(Answered(question, "an answer " * 20, 0.1) for question in scene.questions))
        for scene in scenes
    )
    one, all_rows = draw_sheet(rows[:1], "one"), draw_sheet(rows, "all")
    assert all_rows.height > one.height
    colours = {colour for _, colour in one.getcolors(maxcolors=1_000_000) or ()}
    assert COLOURS["red"] in colours  # the first scene's cross, well inside its outline


def test_thumbnails_keep_their_proportions() -> None:
    narrow = Image.new("RGB", (10, 400), "red")
    sheet = draw_sheet((SheetRow((narrow,), (Answered("?", "!", 0.0),)),), "t")
    reds = np.argwhere((np.asarray(sheet) == (255, 0, 0)).all(axis=-1))
    height, width = reds.max(axis=0) - reds.min(axis=0) + 1
    assert height / width > 20
