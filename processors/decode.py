"""Encoded bytes or a PIL image -> one upright, fully decoded, 8-bit RGB picture.

Of animations and multi-page files (GIF, WebP, TIFF, APNG) the first frame is taken.
"""

from __future__ import annotations

import io
import struct
import zlib
from typing import TYPE_CHECKING

from processors.errors import MediaError, shorten
from processors.png import check_png

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["broken", "check_size", "decode_image", "is_plain", "pass_orientation_on", "upright_rgb"]

_EXIF_ORIENTATION = 0x0112
_FORMATS = (
    "PNG", "JPEG", "MPO", "GIF", "WEBP", "TIFF", "BMP", "DIB", "PPM", "AVIF", "JPEG2000", "ICO", "ICNS", "TGA", "PCX",
    "SGI", "DDS", "QOI", "PSD", "XBM", "XPM",
)  # fmt: skip
"""What is decoded. Left out is what starts other programs or only stubs: EPS (Ghostscript), WMF, FITS, HDF5, ..."""


def broken() -> tuple[type[Exception], ...]:
    """What Pillow raises on damaged files and closed pictures: it parses with plain indexing, struct and assert."""
    from PIL import Image

    parsing = (
        ValueError,
        SyntaxError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        struct.error,
        zlib.error,
    )
    return (OSError, EOFError, RuntimeError, AssertionError, Warning, Image.DecompressionBombError, *parsing)


def decode_image(data: bytes, background: tuple[int, int, int], max_image_pixels: int, name: str) -> Image.Image:
    """Decode `data` completely. `name` says in error messages what was decoded.

    Raises:
        MediaError: Empty, no image, damaged, cut off, or more than `max_image_pixels`.
    """
    from PIL import Image

    if not data:
        raise MediaError(f"{name} is empty (0 bytes)")
    try:
        Image.init()
        image = Image.open(io.BytesIO(data), formats=[name for name in _FORMATS if name in Image.OPEN])
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        # Pillow's own guard, which looks before we can and which the application may have set.
        raise MediaError(f"{name} is too large: {shorten(str(error), 150)}") from error
    except Image.UnidentifiedImageError as error:
        raise MediaError(f"{name} is no image of a known format (it starts with {shorten(data[:16])})") from error
    except broken() as error:
        raise MediaError(f"{name} is damaged: {shorten(str(error))}") from error
    if image.format == "PNG":
        check_size(image, max_image_pixels, name)
        check_png(data, name)
    return upright_rgb(image, background, max_image_pixels, name)


def upright_rgb(image: Image.Image, background: tuple[int, int, int], max_image_pixels: int, name: str) -> Image.Image:
    """The picture with its orientation applied once and its alpha composited on `background`, in RGB.

    `image` is used up: what is upright RGB already is not copied.

    Raises:
        MediaError: Over `max_image_pixels`, no pixels, damaged, or a mode without a known meaning.
    """
    check_size(image, max_image_pixels, name)
    try:
        image.load()
        picture = _to_rgb(_upright(image), background, name)
    except broken() as error:
        raise MediaError(f"{name} is damaged or cut off: {shorten(str(error))}") from error
    picture.info = {}  # the orientation tag lives here: whoever reads the picture next would turn it once more
    return picture


def check_size(image: Image.Image, max_image_pixels: int, name: str) -> None:
    """Raises MediaError for a picture without pixels, or with more than `max_image_pixels`; nothing is decoded."""
    if image.width < 1 or image.height < 1:
        raise MediaError(f"{name} has no pixels ({image.width}x{image.height})")
    if image.width * image.height > max_image_pixels:
        raise MediaError(
            f"{name} is {image.width}x{image.height}, {image.width * image.height} pixels, "
            f"over the limit of {max_image_pixels} (max_image_pixels)"
        )


def is_plain(image: Image.Image) -> bool:
    """Whether the picture is upright, 8-bit RGB without transparency as it is. It must have been loaded."""
    return image.mode == "RGB" and "transparency" not in image.info and _turn(image) is None


def pass_orientation_on(source: Image.Image, copy: Image.Image) -> None:
    """Give a copy the orientation that its source has now: Pillow copies what the file said, not what was set since."""
    try:
        orientation = source.getexif().get(_EXIF_ORIENTATION)
    except broken():
        return  # the copy's can not be read either
    copy.getexif()[_EXIF_ORIENTATION] = orientation if orientation is not None else 1


def _upright(image: Image.Image) -> Image.Image:
    """Apply the EXIF orientation."""
    turn = _turn(image)
    return image if turn is None else image.transpose(turn)


def _turn(image: Image.Image) -> Image.Transpose | None:
    """What the EXIF orientation asks for; a tag that can not be read asks for nothing."""
    from PIL import Image

    turns = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }
    try:
        orientation = image.getexif().get(_EXIF_ORIENTATION)
    except broken():
        return None
    return turns.get(orientation) if isinstance(orientation, int) else None


def _to_rgb(image: Image.Image, background: tuple[int, int, int], name: str) -> Image.Image:
    from PIL import Image

    if image.mode.startswith("I") or image.mode == "F":
        return _deep_grey(image, background, name)
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        straight = image.convert("LA") if image.mode == "La" else image
        below = Image.new("RGBA", image.size, (*background, 255))
        return Image.alpha_composite(below, straight.convert("RGBA")).convert("RGB")
    if image.mode in ("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"):
        return image.convert("RGB") if image.mode != "RGB" else image
    raise MediaError(f"{name} has the mode {image.mode!r}, whose meaning as a picture is not known")


def _deep_grey(image: Image.Image, background: tuple[int, int, int], name: str) -> Image.Image:
    """Grey of 16 or 32 bits, or floats, brought to 8 bits.

    I;16 has its whole range: 65535 is white. I and F do not say theirs, so it is the smallest that holds all values:
    0..1 (F), 0..255 or 0..65535.
    """
    import numpy
    from PIL import Image

    values = numpy.asarray(image.convert("I") if image.mode.startswith("I;16") else image, dtype=numpy.float64)
    if not numpy.isfinite(values).all():
        raise MediaError(f"{name} holds values that are not finite")
    low, high = float(values.min()), float(values.max())
    if low < 0 or high > 65535:
        raise MediaError(f"{name} holds grey values from {low:g} to {high:g}, outside of 0..65535")
    if image.mode.startswith("I;16") or high > 255:
        white = 65535.0
    else:
        white = 1.0 if image.mode == "F" and high <= 1.0 else 255.0
    grey = numpy.rint(values * (255.0 / white)).astype(numpy.uint8)
    picture = numpy.repeat(grey[:, :, None], 3, axis=2)
    clear = image.info.get("transparency")
    if isinstance(clear, int):
        picture[values == clear] = background
    return Image.fromarray(picture)
