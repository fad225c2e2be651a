"""Any form in which a person has an image -> one upright 8-bit RGB picture, within limits.

    path, bytes, file object ─┐
    data: URL, http(s) URL ───┼─> bytes ─> decode ─┐
    PIL, numpy, torch ────────┴────────────────────┴─> upright, alpha composited, RGB

A bare string is a URL if it starts with `data:`, `http://` or `https://`, and a path otherwise.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeAlias, Union

from processors.arrays import is_array, picture_from_array
from processors.decode import broken, check_size, decode_image, is_plain, pass_orientation_on, upright_rgb
from processors.errors import MediaError, shorten
from processors.picture import Picture

if TYPE_CHECKING:
    import numpy
    import torch
    from PIL import Image

__all__ = ["ImageSource", "MediaOptions", "load_image", "load_picture"]

ImageSource: TypeAlias = Union[
    str, "os.PathLike[str]", bytes, IO[bytes], "Image.Image", "numpy.ndarray", "torch.Tensor"
]
"""What `load_image` reads."""


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """Limits and choices for reading images.

    Attributes:
        max_image_pixels: Most pixels (width x height) an image may have, read from the header before decoding; and most
            that a request's processor options may lead to. The default is where Pillow begins to warn; beyond twice
            that, Pillow's own `Image.MAX_IMAGE_PIXELS` refuses too.
        max_image_bytes: Most bytes an encoded image may have: a file, a data URL's payload, a download.
        alpha_background: RGB colour that transparent pixels are composited on.
        allow_files: Whether a bare string or path may name a local file.
        allowed_media_root: If set, local files must lie below this folder (symbolic links resolved).
        allow_urls: Whether http(s) URLs may be fetched.
        allow_private_urls: Whether URLs may lead to private, loopback or otherwise non-public addresses.
        url_timeout: Seconds for a whole download, redirects included.
        max_redirects: Redirects followed; each target is checked like the first address.
    """

    max_image_pixels: int = 89_478_485
    max_image_bytes: int = 64 * 1024 * 1024
    alpha_background: tuple[int, int, int] = (255, 255, 255)
    allow_files: bool = True
    allowed_media_root: str | None = None
    allow_urls: bool = True
    allow_private_urls: bool = False
    url_timeout: float = 30.0
    max_redirects: int = 5

    def __post_init__(self) -> None:
        for name in ("max_image_pixels", "max_image_bytes", "url_timeout"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if self.max_redirects < 0:
            raise ValueError(f"max_redirects must not be negative, not {self.max_redirects}")
        if len(self.alpha_background) != 3 or not all(0 <= value <= 255 for value in self.alpha_background):
            raise ValueError(f"alpha_background must be three numbers of 0..255, not {self.alpha_background}")


def load_image(source: ImageSource, options: MediaOptions = MediaOptions()) -> Image.Image:
    """Read one image from any form: the result is upright, 8 bits a channel, RGB, fully decoded.

    Raises:
        MediaError: It can not be read, is no image, is cut off, or is over a limit.
        MediaFetchError: Its URL can not be fetched or is refused.
    """
    from PIL import Image

    if isinstance(source, Image.Image):
        check_size(source, options.max_image_pixels, "the PIL image")
        return upright_rgb(_own_copy(source), options.alpha_background, options.max_image_pixels, "the PIL image")
    if is_array(source):
        return upright_rgb(picture_from_array(source), options.alpha_background, options.max_image_pixels, "the array")
    data, name = _read_bytes(source, options)
    if len(data) > options.max_image_bytes:
        raise MediaError(f"{name} has {len(data)} bytes, over the limit of {options.max_image_bytes} (max_image_bytes)")
    return decode_image(data, options.alpha_background, options.max_image_pixels, name)


def load_picture(source: ImageSource, options: MediaOptions = MediaOptions()) -> Picture:
    """As `load_image`, for a processor: a PIL image that is upright RGB already is read where it is, not copied."""
    from PIL import Image

    if isinstance(source, Image.Image) and source.mode == "RGB":
        check_size(source, options.max_image_pixels, "the PIL image")
        try:
            with _READING:
                source.load()
                check_size(source, options.max_image_pixels, "the PIL image")  # some formats tell more when loaded
                if is_plain(source):
                    return Picture(source, own=False)
        except broken() as error:
            raise MediaError(f"the PIL image is damaged or cut off: {shorten(str(error))}") from error
    return Picture(load_image(source, options))


_READING = threading.Lock()
"""Held while something of the caller's own is read: Pillow decodes an opened picture in place, and a stream has one
position, so two threads that were given the same object would mix up its pixels."""


def _own_copy(image: Image.Image) -> Image.Image:
    """The caller's picture, decoded, as one that is ours to use up."""
    try:
        with _READING:
            image.load()
            own = image.copy()
            pass_orientation_on(image, own)
        return own
    except broken() as error:
        raise MediaError(f"the PIL image is damaged or cut off: {shorten(str(error))}") from error


def _read_bytes(source: object, options: MediaOptions) -> tuple[bytes, str]:
    """The encoded image and a bounded name for error messages."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        return bytes(source), "the image given as bytes"
    if isinstance(source, str):
        scheme = source[:8].lower()
        if scheme.startswith("data:"):
            from processors.dataurl import decode_data_url

            return decode_data_url(source, options.max_image_bytes), "the image of the data URL"
        if scheme.startswith(("http://", "https://")):
            from processors.fetch import fetch_url

            return fetch_url(source, options), f"the image at {shorten(source)}"
        return _read_file(source, options)
    if isinstance(source, os.PathLike):
        return _read_file(os.fspath(source), options)
    if callable(getattr(source, "read", None)):
        return _read_stream(source, options)
    raise MediaError(
        f"a {type(source).__name__} is no image; give a path, bytes, a file object, a PIL image, a numpy array, "
        "a torch tensor, a data URL or an http(s) URL"
    )


def _read_file(name: str, options: MediaOptions) -> tuple[bytes, str]:
    shown = f"the file {shorten(name)}"
    if not options.allow_files:
        raise MediaError(f"{shown} is refused: local files are not allowed here (allow_files)")
    if not name:
        raise MediaError("an empty string names no image")
    try:
        path = Path(name).resolve() if options.allowed_media_root is not None else Path(name)
        if options.allowed_media_root is not None and not path.is_relative_to(
            Path(options.allowed_media_root).resolve()
        ):
            raise MediaError(f"{shown} is refused: it lies outside the allowed folder (allowed_media_root)")
        if not path.exists():
            raise MediaError(f"{shown} does not exist")
        if not path.is_file():
            raise MediaError(f"{shown} is no regular file")
        with path.open("rb") as stream:
            return stream.read(options.max_image_bytes + 1), shown
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        raise MediaError(f"{shown} can not be read: {reason}") from error


def _read_stream(stream: object, options: MediaOptions) -> tuple[bytes, str]:
    """The whole stream, from its beginning if it can be wound back (as Pillow reads file objects)."""
    shown = "the image of the file object"
    try:
        with _READING:
            if callable(getattr(stream, "seekable", None)) and stream.seekable():  # type: ignore[attr-defined]
                stream.seek(0)  # type: ignore[attr-defined]
            data = stream.read(options.max_image_bytes + 1)  # type: ignore[attr-defined]
    except Exception as error:
        raise MediaError(f"{shown} can not be read: {shorten(str(error))}") from error
    if not isinstance(data, bytes):
        raise MediaError(f"{shown} yields {type(data).__name__}, not bytes: open it in binary mode")
    return data, shown
