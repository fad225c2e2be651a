"""Keys of cache blocks: all that can change the keys and values in a block, chained from the first block on.

Two images, A of ten tokens at 3 and B of four tokens at 13, blocks of 8 tokens::

    index    0     3         8        13   16
             t t t A A A A A A A A A A B B B B t t t
             └── block 0 ──┘ └── block 1 ──┘ └── block 2
    images   (A, -3)         (A, 5) (B, -5)  (B, 3)        block start minus image start

The placeholder ids of A and B are the same, so an image's key, and where in the image the block begins, tell
blocks apart that hold equal ids. A both-way span is part of the content too: what is computed for its first
token depends on where it ends.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["BlockContent", "ContentMap", "Digest", "block_key", "root_key", "sha256"]

Digest: TypeAlias = Callable[[bytes], bytes]


def sha256(payload: bytes) -> bytes:
    """The digest in use: 32 bytes, none of them cut off."""
    return hashlib.sha256(payload).digest()


@dataclass(frozen=True, slots=True)
class BlockContent:
    """What one full block holds, apart from what came before it.

    Attributes:
        token_ids: One id a slot.
        images: (image key, block start minus image start) of each image that overlaps the block.
        spans: Both-way spans that overlap the block, as (start, stop) minus the block's start.
    """

    token_ids: tuple[int, ...]
    images: tuple[tuple[str, int], ...] = ()
    spans: tuple[tuple[int, int], ...] = ()


class ContentMap:
    """Where the images and both-way spans of one prompt lie; gives the content of any block.

    Args:
        images: (key, start, stop) of each image, ascending, none overlapping another.
        spans: (start, stop) of each both-way span, ascending, none overlapping another.
    """

    def __init__(self, images: Sequence[tuple[str, int, int]], spans: Sequence[tuple[int, int]]) -> None:
        self._images = tuple(images)
        self._image_stops = [stop for _, _, stop in images]
        self._spans = tuple(spans)
        self._span_stops = [stop for _, stop in spans]

    def content(self, token_ids: Sequence[int], start: int, stop: int) -> BlockContent:
        """Content of the block of tokens start..stop-1 of the sequence `token_ids`."""
        images = []
        for index in range(bisect_right(self._image_stops, start), len(self._images)):
            key, first, _ = self._images[index]
            if first >= stop:
                break
            images.append((key, start - first))
        spans = []
        for index in range(bisect_right(self._span_stops, start), len(self._spans)):
            first, last = self._spans[index]
            if first >= stop:
                break
            spans.append((first - start, last - start))
        return BlockContent(tuple(token_ids[start:stop]), tuple(images), tuple(spans))


def root_key(identity: str, digest: Digest = sha256) -> bytes:
    """The parent key of every first block: `identity` names the weights, the adapter and the cache's dtype."""
    return digest(b"mmserve-prefix-1:" + identity.encode())


def block_key(parent: bytes, content: BlockContent, digest: Digest = sha256) -> bytes:
    """Key of a block after the block with key `parent`. Every part is counted, so that none can pose as another."""
    parts = [
        len(parent).to_bytes(4, "little"),
        parent,
        array("q", (len(content.token_ids), len(content.images), len(content.spans))).tobytes(),
        array("q", content.token_ids).tobytes(),
    ]
    for key, offset in content.images:
        name = key.encode()
        parts += (array("q", (len(name), offset)).tobytes(), name)
    for span in content.spans:
        parts.append(array("q", span).tobytes())
    return digest(b"".join(parts))
