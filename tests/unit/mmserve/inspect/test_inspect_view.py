"""What is shown of a prompt is what the processor made of it, and nothing is claimed that is not known."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image

from fixtures.tiny_processors.builders import build
from mmserve.demo import demo_model_folder
from mmserve.inspect.sheet import COLOURS, draw_view
from mmserve.inspect.tiles import Normalization, tile_pictures
from mmserve.inspect.view import PromptView, view_prompt
from processors import PromptProcessor


def picture(width: int, height: int) -> Image.Image:
    """A slow gradient, which resizing keeps."""
    rows, columns = numpy.mgrid[0:height, 0:width]
    values = numpy.stack([255 * columns / width, 255 * rows / height, 128 + 0 * rows], axis=-1)
    return Image.fromarray(values.astype(numpy.uint8))


def difference(one: Image.Image, other: Image.Image) -> float:
    """Mean difference of two pictures, the second in the size of the first."""
    resized = numpy.asarray(other.resize(one.size), numpy.float32)
    return float(numpy.abs(numpy.asarray(one, numpy.float32) - resized).mean())


@pytest.fixture(scope="module")
def demo() -> PromptProcessor:
    return PromptProcessor.from_pretrained(demo_model_folder())


@pytest.fixture(scope="module")
def view(demo: PromptProcessor) -> PromptView:
    return view_prompt(demo, demo.process("What is it?", [picture(300, 200)]))


def test_tiles_of_a_cut_picture_and_their_tokens(view: PromptView) -> None:
    (image,) = view.images
    assert image.size == (300, 200)
    assert len(image.tiles) == 5
    for tile in image.tiles:
        assert tile.first_token is not None
        assert tile.last_token is not None
        assert tile.last_token - tile.first_token == 63
        assert {view.tokens[i].kind for i in range(tile.first_token, tile.last_token + 1)} == {"image"}
        assert view.tokens[tile.first_token - 1].kind == view.tokens[tile.last_token + 1].kind == "structure"
    assert difference(image.tiles[-1].picture, picture(300, 200)) < 4  # the whole picture comes last
    assert difference(image.tiles[0].picture, picture(300, 200).crop((0, 0, 150, 100))) < 4


def test_every_token_has_its_kind(view: PromptView) -> None:
    (image,) = view.images
    counts = view.count_kinds()
    assert counts["image"] == image.num_embeds == 5 * 64
    assert counts["structure"] == image.length - image.num_embeds
    assert sum(counts.values()) == len(view.tokens)
    assert "What is it?" in "".join(token.text for token in view.tokens if token.kind == "text")
    assert [token.index for token in view.tokens] == list(range(len(view.tokens)))


def test_json_has_what_the_view_has(view: PromptView) -> None:
    shown = view.as_json()
    assert len(shown["tokens"]) == len(view.tokens)
    assert shown["images"][0]["rows"] == view.images[0].num_embeds
    assert shown["images"][0]["tiles"][0] == {
        "size": [256, 256],
        "first_token": view.images[0].tiles[0].first_token,
        "last_token": view.images[0].tiles[0].last_token,
    }


def test_patches_are_put_together_again() -> None:
    processor = PromptProcessor.from_processor(build("qwen2_vl"))
    made = view_prompt(processor, processor.process("x", [picture(112, 84)]))
    (tile,) = made.images[0].tiles
    assert tile.picture.size == (112, 84)
    assert difference(tile.picture, picture(112, 84)) < 2
    assert tile.first_token == made.images[0].offset


@pytest.mark.parametrize("merge", [1, 2, 4])
def test_the_processors_own_merge_size_is_used(merge: int) -> None:
    """Patches laid out in blocks of merge x merge, one frame each."""
    side, height, width = 2, 8, 4
    whole = torch.rand(3, height * side, width * side)
    blocks = whole.reshape(3, height // merge, merge, side, width // merge, merge, side).permute(1, 4, 2, 5, 0, 3, 6)
    tensors = {
        "pixel_values": blocks.reshape(height * width, -1),
        "image_grid_thw": torch.tensor([[1, height, width]]),
    }
    plain = Normalization.of(None)
    (shown,) = tile_pictures(tensors, plain, (side, 1, merge))
    expected = (whole * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    assert (numpy.asarray(shown) == expected).all()
    assert tile_pictures(tensors, plain, None) == []
    assert tile_pictures(tensors, plain, (side, 2, merge)) == []


def test_single_patches_of_unknown_order_are_not_drawn() -> None:
    assert tile_pictures({"pixel_values": torch.rand(16, 3, 14, 14)}, Normalization.of(None), (14, 1, 2)) == []


def test_no_tokens_are_claimed_for_tiles_of_unequal_shares() -> None:
    """LLaVA-NeXT drops the rows of padding: what a tile takes is not its share of the rows."""
    processor = PromptProcessor.from_processor(build("llava_next"))
    for size in ((112, 112), (112, 56), (150, 60), (90, 200)):
        made = view_prompt(processor, processor.process("x", [picture(*size)]))
        tiles = made.images[0].tiles
        assert len(tiles) > 1
        assert {(tile.first_token, tile.last_token) for tile in tiles} == {(None, None)}


def test_the_sheet_shows_images_and_tokens(view: PromptView, tmp_path: Path) -> None:
    sheet = draw_view(view)
    assert sheet.mode == "RGB"
    colours = {colour for _, colour in sheet.getcolors(1 << 24) or ()}
    for colour in COLOURS.values():
        assert tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5)) in colours
    sheet.save(tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as saved:
        assert saved.size == sheet.size


def test_the_sheet_of_text_alone(demo: PromptProcessor) -> None:
    made = view_prompt(demo, demo.process("Only text,\nwith ünïcode ☃."))
    assert made.images == ()
    assert draw_view(made).height > 40
