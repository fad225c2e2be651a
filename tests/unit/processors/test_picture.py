"""Packed pixels: the same picture as the PIL image's, for the key and for the processor."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from pictures import noise
from PIL import Image

from processors import PromptProcessor
from processors.hashing import image_key, image_mark
from processors.media import load_image, load_picture
from processors.one_thread import use_one_core
from processors.picture import Picture
from processors.planes import pack_planes

Maker = Callable[[str], PromptProcessor]


@pytest.mark.parametrize("size", [(1, 1), (1, 7), (7, 1), (31, 17), (640, 480)])
def test_every_form_has_the_same_pixels(size: tuple[int, int]) -> None:
    image = noise(*size)
    expected = torch.from_numpy(numpy.array(image)).permute(2, 0, 1)
    for picture in (Picture(image), Picture(image, own=False)):
        assert picture.size == size
        assert torch.equal(picture.tensor(), expected)
        assert picture.image.mode == "RGB"
        assert picture.image.tobytes() == image.tobytes()


def test_a_callers_picture_is_read_once_and_not_kept() -> None:
    image = noise(40, 30)
    picture = load_picture(image)
    before = image.tobytes()
    assert picture.planes()
    image.paste((0, 0, 0), (0, 0, 40, 30))
    assert picture.image.tobytes() == before
    assert torch.equal(picture.tensor(), Picture(noise(40, 30)).tensor())


@pytest.mark.parametrize("size", [(2400, 2000), (300_000, 1), (1, 300_000)])
def test_planes_of_large_pictures_and_of_any_pillow(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A large picture lies in several pieces of memory; an older Pillow does not show where."""
    image = noise(*size)
    expected = b"".join(channel.tobytes() for channel in image.split())
    with monkeypatch.context() as patch:
        if hasattr(image, "__arrow_c_array__"):
            patch.setattr(Image.Image, "tobytes", None)
        assert pack_planes(image) == expected
    for refusal in (AttributeError, ValueError):

        def refuse(self: Image.Image, kind: type[Exception] = refusal) -> None:
            raise kind

        monkeypatch.setattr(Image.Image, "__arrow_c_array__", refuse)
        assert pack_planes(image) == expected


def test_planes_are_a_copy_and_the_image_can_be_written_to_afterwards() -> None:
    image = noise(40, 30)
    before = image.tobytes()
    planes = pack_planes(image)
    image.putpixel((0, 0), (1, 2, 3))
    assert Picture(Image.frombytes("RGB", (40, 30), before)).planes() == planes
    assert image.getpixel((0, 0)) == (1, 2, 3)


def test_a_picture_that_is_known_by_name_is_not_read(builders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = PromptProcessor.from_processor(builders.build("llava"))
    first = processor.process("x", [noise(70, 60)], image_ids=["a"])
    monkeypatch.setattr(Picture, "planes", None)
    assert processor.process("x", [noise(70, 60)], image_ids=["a"]).images[0].key == first.images[0].key


def test_what_is_not_plain_is_made_upright_rgb_first() -> None:
    image = noise(40, 30)
    image.getexif()[0x0112] = 6
    assert load_picture(image).size == load_image(image).size == (30, 40)
    stream = io.BytesIO()
    image.save(stream, "JPEG", exif=image.getexif())
    opened = Image.open(stream)
    assert load_picture(opened).size == (30, 40)
    opened.getexif()[0x0112] = 1
    assert load_picture(opened).size == load_image(opened).size == (40, 30)
    clear = Image.new("RGB", (4, 4), "red")
    clear.info["transparency"] = (255, 0, 0)
    assert load_picture(clear).planes() == bytes([255] * 48)


def test_equal_keys_have_equal_marks() -> None:
    pictures = [noise(300, 200, seed) for seed in range(3)]
    assert len({image_mark(Picture(p), {}, "x") for p in pictures}) == 3
    one, same = Picture(pictures[0]), Picture(pictures[0], own=False)
    assert image_mark(one, {}, "x") == image_mark(same, {}, "x")
    others = {image_mark(one, {"a": 1}, "x"), image_mark(one, {}, "y"), image_mark(one, {}, "x")}
    assert len(others) == 3
    for size in ((1, 1), (2, 1), (1, 2), (1000, 1)):
        assert image_mark(Picture(noise(*size)), {}, "x")


def test_a_key_made_beside_the_processor_is_the_same_key(builders: Any) -> None:
    """Large new pictures are hashed by another thread while they are processed, and found again by their key."""
    beside = PromptProcessor.from_processor(builders.build("llava"), workers=2)
    alone = PromptProcessor.from_processor(builders.build("llava"), workers=1)
    almost = noise(700, 600, 1)
    almost.putpixel((3, 3), (1, 2, 3))
    for picture in (noise(700, 600, 1), noise(700, 600, 1), almost, noise(700, 600, 2)):
        assert len(Picture(picture).planes()) > 1 << 20
        ours, theirs = (p.process("x", [picture]).images[0] for p in (beside, alone))
        assert ours.key == theirs.key
        assert torch.equal(ours.tensors["pixel_values"], theirs.tensors["pixel_values"])
    stats = beside.describe()["image_cache"]
    assert isinstance(stats, dict)
    assert (stats["entries"], stats["hits"], stats["misses"]) == (3, 1, 3)
    beside.close()
    assert beside.process("x", [almost]).images[0].key == alone.process("x", [almost]).images[0].key
    beside.close()


def test_an_image_that_fails_while_it_is_hashed_fails_alone(builders: Any) -> None:
    processor = PromptProcessor.from_processor(builders.build("llava"), workers=2)
    with pytest.raises(Exception, match="can not process"):
        processor.process("x", [noise(700, 600)], options={"image_mean": [0.5, 0.5]})
    assert processor.process("x", [noise(700, 600)]).images
    processor.close()


def test_pictures_are_packed_only_where_that_changes_nothing(builders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hf = builders.build("llava")
    assert PromptProcessor.from_processor(hf).describe()["pictures_given_as"] == "packed pixels"
    hf = builders.build("llava")
    own = type(hf.image_processor).preprocess

    def preprocess(self: Any, images: Any, *args: Any, **settings: Any) -> Any:
        outputs = own(self, images, *args, **settings)
        if "input_data_format" in settings:
            outputs["pixel_values"] = outputs["pixel_values"] + 1e-6
        return outputs

    monkeypatch.setattr(type(hf.image_processor), "preprocess", preprocess)
    assert PromptProcessor.from_processor(hf).describe()["pictures_given_as"] == "PIL images"


def test_one_thread_works_alone_and_others_as_before() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    seen: list[int] = []

    def work(alone: bool) -> None:
        if alone:
            use_one_core()
        seen.append(torch.get_num_threads())

    try:
        for alone in (True, False):
            thread = threading.Thread(target=work, args=(alone,))
            thread.start()
            thread.join()
        assert seen == [1, 2]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_keys_of_packed_and_plain_pictures_are_equal() -> None:
    image = noise(50, 40)
    assert image_key(Picture(image), {}, "p") == image_key(Picture(image, own=False), {}, "p")
