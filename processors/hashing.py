"""The content key of one image: equal keys mean equal processor outputs.

A key is 64 hexadecimal digits over everything that can change the tensors: the final pixels, the size, the
request's processor options, and the processor itself (its configuration and the library that runs it).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from processors.errors import OptionError, shorten

if TYPE_CHECKING:
    from processors.picture import Picture

__all__ = ["canonical", "fingerprint", "image_key", "image_mark"]

_SAMPLES = 1024


def canonical(options: Mapping[str, object]) -> bytes:
    """One byte string for equal options, whatever their order.

    Raises:
        OptionError: A value has no stable text form (an object, an array): such an option can not be part of a key.
    """
    try:
        return json.dumps(options, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"processor options must be plain values (numbers, text, lists, mappings): {shorten(str(error))}"
        ) from error


def fingerprint(*parts: str) -> str:
    """A stable name for what `parts` describe, e.g. a processor's configuration and its library's version."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def image_key(picture: Picture, options: Mapping[str, object], processor: str, image_id: str | None = None) -> str:
    """The key of `picture` under `options` and the processor fingerprint `processor`.

    `image_id`, the caller's own name for the content, takes the place of the pixels: the caller then vouches that
    equal ids mean equal pictures. Ids and pixels can not collide: each kind has its own prefix.
    """
    digest = hashlib.sha256()
    settings = canonical(options)
    digest.update(f"{processor}|{len(settings)}|".encode() + settings)
    digest.update(f"|{picture.size[0]}x{picture.size[1]}|".encode())
    if image_id is not None:
        digest.update(b"id|" + image_id.encode("utf-8", "surrogatepass"))
    else:
        digest.update(b"pixels|")
        digest.update(picture.planes())
    return digest.hexdigest()


def image_mark(picture: Picture, options: Mapping[str, object], processor: str) -> bytes:
    """A quick look at what `image_key` hashes: pictures of different marks have different keys.

    Pictures of equal marks may still differ: some thousand values of the pixels are looked at.
    """
    planes = picture.planes()
    digest = hashlib.sha256(f"{processor}|{picture.size[0]}x{picture.size[1]}|".encode() + canonical(options))
    digest.update(planes[:: len(planes) // _SAMPLES | 1].tobytes())
    return digest.digest()
