"""Data URLs (RFC 2397): `data:[<media type>][;<attribute>=<value>]*[;base64],<data>`.

Tolerant where senders differ: upper case, no media type, parameters before `;base64`, percent-encoding,
line breaks, the URL-safe alphabet, missing padding. A fragment (`#...`, RFC 3986, section 3.5) is no part of the data.
Everything else is refused.
"""

from __future__ import annotations

import base64
import binascii
import re
from urllib.parse import unquote_to_bytes

from processors.errors import MediaError, shorten

__all__ = ["decode_data_url"]

_SPACES = re.compile(rb"[\s]+")
_BASE64 = re.compile(rb"[A-Za-z0-9+/]*")


def decode_data_url(url: str, max_image_bytes: int) -> bytes:
    """The bytes that `url` carries.

    Raises:
        MediaError: Not a data URL, damaged base64, no data, or more than `max_image_bytes`.
    """
    head, comma, rest = url.partition(",")
    payload = rest.partition("#")[0]
    if not head.lower().startswith("data:") or not comma:
        raise MediaError(f"a data URL needs the form data:image/png;base64,... with a comma, not {shorten(url, 60)}")
    if len(payload) > 4 * max_image_bytes + 1024:
        # Even percent-encoded base64 takes no more than four characters a byte: refuse before copying it.
        raise MediaError(f"the data URL is over the limit of {max_image_bytes} bytes (max_image_bytes)")
    try:
        data = unquote_to_bytes(payload)
    except UnicodeError as error:
        raise MediaError("the data URL holds characters that are no valid Unicode") from error
    parameters = [part.strip().lower() for part in head.split(";")[1:]]
    if "base64" in parameters:
        data = _decode_base64(data)
    if not data:
        raise MediaError("the data URL carries no data")
    if len(data) > max_image_bytes:
        raise MediaError(
            f"the data URL carries {len(data)} bytes, over the limit of {max_image_bytes} (max_image_bytes)"
        )
    return data


def _decode_base64(text: bytes) -> bytes:
    text = _SPACES.sub(b"", text).translate(bytes.maketrans(b"-_", b"+/")).rstrip(b"=")
    if not _BASE64.fullmatch(text) or len(text) % 4 == 1:
        raise MediaError("the data URL's base64 is damaged")
    try:
        return base64.b64decode(text + b"=" * (-len(text) % 4), validate=True)
    except binascii.Error as error:
        raise MediaError(f"the data URL's base64 is damaged: {error}") from error
