"""Every form of an image becomes the same upright RGB picture, or one clear error."""

from __future__ import annotations

import base64
import dataclasses
import io
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from urllib.parse import quote_from_bytes

import numpy
import pytest
import torch
from pictures import noise
from PIL import Image

from mmserve.assembly import load_processor
from mmserve.config import EngineConfig
from processors import MediaError, MediaOptions, PromptProcessor, load_image


def _encoded(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def _same(one: Image.Image, other: Image.Image) -> bool:
    return one.mode == other.mode == "RGB" and one.size == other.size and one.tobytes() == other.tobytes()


def _png_header(width: int, height: int) -> bytes:
    """A PNG whose header promises a size and whose data is one byte."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"x") + chunk(b"IEND", b"")


PICTURE = noise(24, 16, 3)


def test_every_form_gives_the_same_picture(tmp_path: Path) -> None:
    path = tmp_path / "a picture.png"
    PICTURE.save(path)
    data = path.read_bytes()
    array = numpy.asarray(PICTURE)
    for source in (
        str(path),
        path,
        data,
        bytearray(data),
        io.BytesIO(data),
        PICTURE,
        array,
        torch.from_numpy(array.copy()).permute(2, 0, 1),
        array.astype(numpy.float32) / 255,
        "data:image/png;base64," + base64.b64encode(data).decode(),
    ):
        assert _same(load_image(source), PICTURE), type(source)
    with path.open("rb") as stream:
        assert _same(load_image(stream), PICTURE)


def test_the_result_is_a_picture_of_its_own() -> None:
    loaded = load_image(PICTURE)
    loaded.putpixel((0, 0), (1, 2, 3))
    assert PICTURE.getpixel((0, 0)) != (1, 2, 3)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied_once(orientation: int) -> None:
    turn = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }
    exif = Image.Exif()
    exif[0x0112] = orientation
    expected = PICTURE.transpose(turn[orientation]) if orientation in turn else PICTURE
    loaded = load_image(_encoded(PICTURE, "PNG", exif=exif))
    assert _same(loaded, expected)
    assert _same(load_image(loaded), expected)  # no tag is left that a second reader would apply again


@pytest.mark.parametrize("form", ["JPEG", "MPO", "TIFF", "WEBP", "AVIF", "PNG"])
def test_every_format_that_has_an_orientation_is_turned_once(form: str) -> None:
    """Pillow turns some formats by itself while it decodes them, and others not."""
    flat = Image.new("RGB", (48, 16), "red")
    flat.paste("blue", (24, 0, 48, 16))
    exif = Image.Exif()
    exif[0x0112] = 6
    for source in (data := _encoded(flat, form, exif=exif), Image.open(io.BytesIO(data))):
        loaded = load_image(source)
        assert loaded.size == (16, 48)
        top, bottom = loaded.getpixel((8, 8)), loaded.getpixel((8, 40))
        assert top[0] > 200 > 60 > top[2]  # type: ignore[index]
        assert bottom[2] > 200 > 60 > bottom[0]  # type: ignore[index]


@pytest.mark.parametrize("value", [0, 9, 77])
def test_an_unknown_orientation_means_none(value: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = value
    assert _same(load_image(_encoded(PICTURE, "PNG", exif=exif)), PICTURE)


def test_damaged_exif_means_none() -> None:
    assert _same(load_image(_encoded(PICTURE, "PNG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")), PICTURE)


def _hidden(mode: str) -> Image.Image:
    """Noise under an alpha of zero."""
    image = noise(8, 6).convert(mode)
    image.putalpha(0)
    return image


def _clear_palette() -> Image.Image:
    image = Image.new("P", (8, 6), 1)
    image.putpalette([255, 0, 0, 0, 255, 0])
    image.info["transparency"] = 1
    return image


@pytest.mark.parametrize("background", [(255, 255, 255), (10, 20, 30)])
@pytest.mark.parametrize("make", [lambda: _hidden("RGBA"), lambda: _hidden("LA"), _clear_palette])
def test_transparent_pixels_show_the_background(background: tuple[int, int, int], make: object) -> None:
    image = make()  # type: ignore[operator]
    loaded = load_image(image, MediaOptions(alpha_background=background))
    assert _same(loaded, Image.new("RGB", image.size, background))
    stored = load_image(_encoded(image), MediaOptions(alpha_background=background))
    assert _same(stored, Image.new("RGB", image.size, background))


def test_half_transparent_pixels_are_mixed() -> None:
    image = Image.new("RGBA", (4, 4), (0, 0, 0, 128))
    assert load_image(image).getpixel((0, 0)) == (127, 127, 127)


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "PA", "RGBA", "CMYK", "YCbCr", "RGBX", "I", "F", "HSV", "LAB"])
def test_modes_keep_the_picture(mode: str) -> None:
    """Half black and half white looks the same in every mode."""
    image = Image.new("L", (28, 28), 0)
    image.paste(255, (14, 0, 28, 28))
    loaded = load_image(image.convert("RGB").convert("LAB") if mode == "LAB" else image.convert(mode))
    assert loaded.mode == "RGB"
    assert max(loaded.getpixel((3, 3))) <= 2  # type: ignore[type-var]
    assert min(loaded.getpixel((20, 3))) >= 253  # type: ignore[type-var]


@pytest.mark.parametrize("mode", ["P", "PA", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV"])
def test_modes_keep_the_colours(mode: str) -> None:
    image = Image.new("RGB", (30, 10), (200, 40, 90))
    image.paste((20, 150, 60), (15, 0, 30, 10))
    given = image.convert("P").convert("PA") if mode == "PA" else image.convert(mode)
    loaded = load_image(given)
    for place in ((5, 5), (25, 5)):
        pairs = zip(loaded.getpixel(place), image.getpixel(place), strict=True)  # type: ignore[arg-type]
        assert max(abs(ours - own) for ours, own in pairs) <= (60 if mode in ("P", "PA") else 6)
    if mode in ("P", "PA"):
        assert _same(loaded, image.convert("P").convert("RGB"))


@pytest.mark.parametrize("kind", [">u2", "<u2"])
def test_deep_grey_of_either_byte_order(kind: str) -> None:
    values = numpy.array([[0, 257 * 100, 65535]], numpy.uint16)
    mode = "I;16B" if kind == ">u2" else "I;16"
    image = Image.frombytes(mode, (3, 1), values.astype(kind).tobytes())
    assert numpy.asarray(load_image(image))[0, :, 0].tolist() == [0, 100, 255]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (numpy.array([[0, 257 * 100], [257 * 200, 65535]], numpy.uint16), [0, 100, 200, 255]),
        (numpy.array([[0, 257 * 100], [257 * 200, 65535]], numpy.int32), [0, 100, 200, 255]),
        (numpy.array([[0, 100], [200, 255]], numpy.int32), [0, 100, 200, 255]),
        (numpy.array([[0, 100 / 255], [200 / 255, 1]], numpy.float32), [0, 100, 200, 255]),
        (numpy.array([[0, 100], [200, 255]], numpy.float32), [0, 100, 200, 255]),
    ],
)
def test_deep_grey_is_scaled(values: numpy.ndarray, expected: list[int]) -> None:
    loaded = load_image(Image.fromarray(values))
    assert numpy.asarray(loaded)[:, :, 0].ravel().tolist() == expected
    if values.dtype == numpy.uint16:
        assert _same(load_image(_encoded(Image.fromarray(values))), loaded)


@pytest.mark.parametrize("bad", [float("nan"), -1.0, 1e9])
def test_impossible_grey_is_refused(bad: float) -> None:
    with pytest.raises(MediaError):
        load_image(Image.fromarray(numpy.array([[0.0, bad]], numpy.float32)))


@pytest.mark.parametrize("shape", [(w, h) for w in (1, 2, 3, 4) for h in (1, 2, 3, 4)] + [(1, 500), (500, 1)])
def test_tiny_pictures(shape: tuple[int, int]) -> None:
    image = noise(*shape)
    assert _same(load_image(image), image)
    assert _same(load_image(_encoded(image)), image)
    assert _same(load_image(numpy.asarray(image)), image)


def test_arrays_of_every_layout() -> None:
    rgb = numpy.asarray(PICTURE)
    assert _same(load_image(rgb.transpose(2, 0, 1).copy()), PICTURE)
    assert _same(load_image(torch.from_numpy(rgb.copy())), PICTURE)
    grey = rgb[:, :, 0]
    for layout in (grey, grey[:, :, None], grey[None]):
        assert load_image(layout).getpixel((5, 5)) == (int(grey[5, 5]),) * 3
    clear = numpy.dstack([rgb, numpy.zeros_like(grey)])
    assert load_image(clear).getpixel((0, 0)) == (255, 255, 255)
    assert load_image(numpy.array([[True, False]])).getpixel((0, 0)) == (255, 255, 255)
    assert _same(load_image(rgb.astype(numpy.uint16) * 257), PICTURE)
    assert _same(load_image(torch.from_numpy(rgb.copy()).permute(2, 0, 1).to(torch.float64) / 255), PICTURE)


@pytest.mark.parametrize(
    "array",
    [
        numpy.zeros((0, 5, 3), numpy.uint8),
        numpy.zeros((5,), numpy.uint8),
        numpy.zeros((1, 5, 5, 3), numpy.uint8),
        numpy.zeros((5, 5, 7), numpy.uint8),
        numpy.full((5, 5, 3), 1.5),
        numpy.full((5, 5, 3), numpy.nan),
        numpy.full((5, 5, 3), 256),
        numpy.full((5, 5, 3), -1),
        numpy.full((5, 5, 3), 1j),
        numpy.array([["a"]]),
    ],
)
def test_odd_arrays_are_refused(array: numpy.ndarray) -> None:
    with pytest.raises(MediaError):
        load_image(array)


@pytest.mark.parametrize("form", ["GIF", "WEBP", "TIFF", "PNG"])
def test_of_several_frames_the_first_is_taken(form: str) -> None:
    first, second = Image.new("RGB", (9, 7), "red"), Image.new("RGB", (9, 7), "blue")
    options = {"lossless": True} if form == "WEBP" else {}
    data = _encoded(first, form, save_all=True, append_images=[second], **options)
    assert load_image(data).getpixel((4, 4)) == (255, 0, 0)


FORMATS = [
    ("PNG", {}),
    ("JPEG", {}),
    ("JPEG", {"progressive": True}),
    ("GIF", {}),
    ("WEBP", {}),
    ("WEBP", {"lossless": True}),
    ("BMP", {}),
    ("PPM", {}),
    ("TIFF", {}),
    ("AVIF", {}),
]


@pytest.mark.parametrize(("form", "options"), FORMATS)
def test_a_cut_file_is_refused_or_complete(form: str, options: dict[str, object]) -> None:
    data = _encoded(noise(40, 30), form, **options)
    whole = load_image(data)
    messages = []
    for end in sorted({*range(len(data) - 160, len(data)), *range(0, len(data), 97)}):
        try:
            assert _same(load_image(data[:end]), whole), end
        except MediaError as error:
            messages.append(str(error))
    assert len(messages) > 140
    assert max(map(len, messages)) < 300


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_png_without_its_end_is_refused(cut: int) -> None:
    with pytest.raises(MediaError, match="cut off"):
        load_image(_encoded(PICTURE)[:-cut])


@pytest.mark.parametrize(("form", "options"), FORMATS)
def test_flipped_bits_are_refused_or_harmless(form: str, options: dict[str, object]) -> None:
    """Never anything but a picture or a MediaError; for PNG, which has checksums, never another picture."""
    data = _encoded(noise(40, 30), form, **options)
    whole = load_image(data)
    random = numpy.random.default_rng(7)
    for position, bit in zip(random.integers(0, len(data), 150), random.integers(0, 8, 150), strict=True):
        damaged = bytearray(data)
        damaged[position] ^= 1 << int(bit)
        try:
            loaded = load_image(bytes(damaged), MediaOptions(max_image_pixels=10_000))
        except MediaError:
            continue
        assert form != "PNG" or _same(loaded, whole)


@pytest.mark.parametrize(
    "data",
    [b"", b"<html>no image</html>", b"\0" * 100, b"RIFF\xff\xff\xff\xffWEBPVP8 ", b"GIF89a", b"\xff\xd8\xff"],
)
def test_what_is_no_image_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    for source in (data, path, io.BytesIO(data)):
        with pytest.raises(MediaError):
            load_image(source)


@pytest.mark.parametrize("side", [10_000, 12_000, 20_000, 2_000_000_000])
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_the_header_is_enough_to_refuse_a_huge_picture(side: int) -> None:
    with pytest.raises(MediaError, match=r"max_image_pixels|too large|damaged"):
        load_image(_png_header(side, side))


def test_the_pixel_limit_is_exact() -> None:
    assert load_image(PICTURE, MediaOptions(max_image_pixels=24 * 16)).size == (24, 16)
    with pytest.raises(MediaError, match="24x16"):
        load_image(PICTURE, MediaOptions(max_image_pixels=24 * 16 - 1))


def test_the_byte_limit_holds_for_every_source(tmp_path: Path) -> None:
    data = _encoded(PICTURE)
    path = tmp_path / "a.png"
    path.write_bytes(data)
    url = "data:;base64," + base64.b64encode(data).decode()
    for source in (data, path, io.BytesIO(data), url):
        assert load_image(source, MediaOptions(max_image_bytes=len(data))).size == (24, 16)
        with pytest.raises(MediaError, match="max_image_bytes"):
            load_image(source, MediaOptions(max_image_bytes=len(data) - 1))


def test_missing_files_and_folders(tmp_path: Path) -> None:
    for source in ("", str(tmp_path / "none.png"), str(tmp_path), tmp_path, "a\0b", "x" * 100_000):
        with pytest.raises(MediaError) as caught:
            load_image(source)
        assert len(str(caught.value)) < 300


def test_files_can_be_bound_to_a_folder_or_refused(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    outside.mkdir()
    for folder in (inside, outside):
        PICTURE.save(folder / "a.png")
    (inside / "link.png").symlink_to(outside / "a.png")
    options = MediaOptions(allowed_media_root=str(inside))
    assert load_image(inside / "a.png", options).size == (24, 16)
    for source in (outside / "a.png", inside / ".." / "out" / "a.png", inside / "link.png"):
        with pytest.raises(MediaError, match="outside"):
            load_image(source, options)
    with pytest.raises(MediaError, match="allow_files"):
        load_image(inside / "a.png", MediaOptions(allow_files=False))


def test_a_format_that_starts_another_program_is_not_decoded() -> None:
    buffer = io.BytesIO()
    PICTURE.save(buffer, "EPS")
    with pytest.raises(MediaError, match="known format"):
        load_image(buffer)


def test_a_closed_picture_is_refused(tmp_path: Path) -> None:
    PICTURE.save(tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        pass
    with pytest.raises(MediaError):
        load_image(image)


@pytest.mark.parametrize("source", [None, 5, object(), [1, 2], io.StringIO("text")])
def test_other_objects_are_refused(source: object) -> None:
    with pytest.raises(MediaError):
        load_image(source)  # type: ignore[arg-type]


DATA = _encoded(PICTURE)
BASE64 = base64.b64encode(DATA).decode()


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{BASE64}",
        f"DATA:IMAGE/PNG;BASE64,{BASE64}",
        f"data:;base64,{BASE64}",
        f"data:image/png;charset=utf-8;base64,{BASE64}",
        f"data:image/png; base64,{BASE64}",
        f"data:image/png;base64,{BASE64.rstrip('=')}",
        f"data:image/png;base64,{base64.urlsafe_b64encode(DATA).decode()}",
        "data:image/png;base64," + "\n".join(BASE64[i : i + 76] for i in range(0, len(BASE64), 76)),
        "data:image/png;base64," + BASE64.replace("+", "%2B").replace("/", "%2F").replace("=", "%3D"),
        f"data:image/png,{quote_from_bytes(DATA)}",
        f"data:,{quote_from_bytes(DATA)}",
        f"data:text/html;name=a.png;charset=US-ASCII;Base64,{BASE64}",
        f"data:image/png;base64;charset=utf-8,{BASE64}",
        f"dAtA:image/png;base64 ,{BASE64}",
        f"data:image/png;base64, {BASE64} ",
        "data:image/png;base64," + "\r\n\t".join(BASE64),
        "data:image/png;base64," + "".join(f"%{ord(c):02x}" for c in BASE64),
        f"data:image/png;base64,{BASE64.rstrip('=')}====",
        f"data:image/png;base64,{BASE64}#page=1",
        f"data:image/png,{quote_from_bytes(DATA)}#a,b",
        f"data:image/png;name=base64;base64,{BASE64}",
        f"data:image/png;name=%22a%2Cb%22;base64,{BASE64}",
        f"data:image/svg%2Bxml;BASE64,{BASE64}",
    ],
)
def test_data_urls(url: str) -> None:
    assert _same(load_image(url), PICTURE)


@pytest.mark.parametrize(
    "url",
    [
        "data:",
        "data:image/png;base64",
        "data:image/png;base64,",
        "data:image/png;base64,!!!!",
        "data:image/png;base64,A",
        f"data:image/png;base64,{BASE64[:-40]}é",
        f"data:image/png;base64,{BASE64[:-40]}\ud800",
        f"data:image/png;base64,{BASE64[:40]}={BASE64[40:]}",
        "data:image/png;base64,%",
        "data:image/png;base64,====",
        f"data:image/png;base64,#{BASE64}",
        f"data:image/png;name=base64,{BASE64}",
        "data:,",
        "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg'/%3E",
        f"data:image/png,{BASE64}",
        "data:image/png;base64," + "?" * 200_000,
        "data:image/webp;base64," + base64.b64encode(b"RIFF\0\0\0\0WEBPVP8X").decode(),
        "data:" + "x" * 200_000,
    ],
)
def test_bad_data_urls_are_refused_with_a_short_message(url: str) -> None:
    with pytest.raises(MediaError) as caught:
        load_image(url)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "options",
    [
        {"max_image_pixels": 0},
        {"max_image_bytes": -1},
        {"url_timeout": 0},
        {"max_redirects": -1},
        {"alpha_background": (0, 0)},
    ],
)
def test_impossible_limits_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        MediaOptions(**options)  # type: ignore[arg-type]


def test_limits_have_the_names_that_an_engine_gives_them() -> None:
    """Messages name them: whoever reads one must find the option."""
    names = {field.name for field in dataclasses.fields(MediaOptions)}
    shared = {
        "max_image_pixels", "max_image_bytes", "alpha_background", "allow_private_urls", "allowed_media_root",
        "url_timeout",
    }  # fmt: skip
    assert shared <= names
    assert shared <= set(EngineConfig.model_fields)


def test_an_engines_limits_reach_its_processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: dict[str, object] = {}
    monkeypatch.setattr(PromptProcessor, "from_pretrained", lambda _folder, **options: given.update(options))
    config = EngineConfig(
        max_image_pixels=5, max_image_bytes=6, allow_private_urls=True, allowed_media_root=tmp_path, url_timeout=2.5
    )
    load_processor(tmp_path, config)
    assert given["media"] == MediaOptions(
        max_image_pixels=5,
        max_image_bytes=6,
        allow_private_urls=True,
        allowed_media_root=str(tmp_path),
        url_timeout=2.5,
    )


@pytest.mark.parametrize("form", ["JPEG", "PNG"])
def test_one_lazily_opened_picture_may_be_read_by_many_threads(tmp_path: Path, form: str) -> None:
    file = tmp_path / "picture"
    noise(600, 500, 3).save(file, form)
    with Image.open(file) as picture:
        expected = picture.convert("RGB").tobytes()
    for _ in range(4):
        lazy = Image.open(file)
        with ThreadPoolExecutor(6) as threads:
            read = list(threads.map(lambda _, lazy=lazy: load_image(lazy).tobytes(), range(6)))
        lazy.close()
        assert read == [expected] * 6


def test_one_stream_may_be_read_by_many_threads() -> None:
    buffer = io.BytesIO()
    noise(300, 200, 4).save(buffer, "PNG")
    with ThreadPoolExecutor(6) as threads:
        read = list(threads.map(lambda _: load_image(buffer).tobytes(), range(24)))
    assert set(read) == {noise(300, 200, 4).tobytes()}


def test_a_png_with_any_flipped_bit_gives_the_same_picture_or_an_error() -> None:
    picture = noise(40, 30, 5)
    data = _encoded(picture)
    refused = 0
    for position in range(8, len(data), 7):
        damaged = bytearray(data)
        damaged[position] ^= 1 << (position % 8)
        try:
            read = load_image(bytes(damaged))
        except MediaError:
            refused += 1
            continue
        assert read.tobytes() == picture.tobytes(), position
    assert refused > 0.9 * len(range(8, len(data), 7))


@pytest.mark.parametrize("missing", [1, 4, 8, 12, 20])
def test_a_png_that_lost_its_last_bytes_is_refused(missing: int) -> None:
    with pytest.raises(MediaError, match="cut off"):
        load_image(_encoded(noise(20, 20))[:-missing])


@pytest.mark.parametrize("form", ["JPEG", "GIF", "WEBP", "TIFF", "BMP", "JPEG2000", "TGA", "ICO"])
def test_damaged_files_of_every_form_are_pictures_or_errors_of_ours(form: str) -> None:
    """Cut, overwritten and with bytes put in between: never another exception, never a long message."""
    random = Random(5)
    told = [0]
    whole = _encoded(PICTURE, form)
    for attempt in range(40):
        data = bytearray(whole)
        at = random.randrange(len(data))
        if attempt % 3 == 0:
            del data[at:]
        elif attempt % 3 == 1:
            for _ in range(3):
                data[random.randrange(min(64, len(data)) if attempt % 2 else len(data))] = random.randrange(256)
        else:
            data[at:at] = random.randbytes(random.randrange(1, 20))
        try:
            picture = load_image(bytes(data), MediaOptions(max_image_pixels=1_000_000))
        except MediaError as error:
            told.append(len(str(error)))
        else:
            assert picture.mode == "RGB"
    assert max(told) < 400


def test_bombs_in_any_part_of_a_file_are_refused() -> None:
    def gif(screen: int, frame: int) -> bytes:
        size = struct.pack("<HHBBB", screen, screen, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff"
        return b"GIF89a" + size + b",\0\0\0\0" + struct.pack("<HH", frame, frame) + b"\0\x02\x02\x4c\x01\0;"

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    png = _encoded(PICTURE, "PNG")
    head, body = png[:33], png[33:]  # signature and IHDR
    text = chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(20_000_000)))
    profile = chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(20_000_000)))
    for data in (gif(60_000, 10), gif(10, 60_000), gif(3_000, 3_000), head + text + body, head + profile + body):
        with pytest.raises(MediaError):
            load_image(data, MediaOptions(max_image_pixels=1_000_000))
    with pytest.raises(MediaError):
        load_image(b"GIF89a" + struct.pack("<HHBBB", 10, 10, 0, 0, 0) + b";")  # no frame


def test_inks_and_transparent_greys_of_files() -> None:
    ink = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    for form in ("JPEG", "TIFF"):  # a JPEG holds them inverted
        assert load_image(_encoded(ink, form)).getpixel((4, 4)) == (255, 0, 0)
    palette = Image.new("P", (3, 1))
    palette.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    palette.putdata([0, 1, 2])
    for form, clear, expected in (
        ("PNG", b"\x00\x80\xff", [(255, 255, 255), (127, 255, 127), (0, 0, 255)]),
        ("GIF", 1, [(255, 0, 0), (255, 255, 255), (0, 0, 255)]),
    ):
        picture = load_image(_encoded(palette, form, transparency=clear))
        assert [picture.getpixel((i, 0)) for i in range(3)] == expected
    for mode, data in (("I;16", b"\xff\xff\x00\x80"), ("I;16B", b"\xff\xff\x80\x00")):
        picture = load_image(Image.frombytes(mode, (2, 1), data))
        assert [picture.getpixel((i, 0)) for i in range(2)] == [(255, 255, 255), (128, 128, 128)]
