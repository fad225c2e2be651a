"""Image sources of one prompt -> pictures, keys and expansions; side by side where there are several.

source ──load──> upright RGB ──hash──> key ──in the cache?──no──> the processor ──> cache
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from processors.cache import ExpansionCache
from processors.errors import ProcessorError
from processors.expand import Expansion, ImageExpander
from processors.features import ImageFeatures, features_key, own_features, without_pixels
from processors.hashing import canonical, fingerprint, image_key, image_mark
from processors.limits import OptionLimits
from processors.media import MediaOptions, load_picture
from processors.one_thread import use_one_core
from processors.picture import Picture

__all__ = ["ImagePreparer", "PreparedImage"]

_LONG_HASH = 1 << 20
"""Bytes of pixels that take about half a millisecond to hash."""


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """One image, ready to be put into a prompt: content key, (width, height) as given, expansion.

    If its rows were given in place of a picture, `features` has them, and the expansion no pixels. `is_new`: the
    expansion was made now, and not found in the cache.
    """

    key: str
    size: tuple[int, int]
    expansion: Expansion
    features: ImageFeatures | None = None
    is_new: bool = False


class ImagePreparer:
    """Prepares images, any number of prompts at once."""

    def __init__(
        self,
        expander: ImageExpander,
        fingerprint: str,
        media: MediaOptions,
        limits: OptionLimits,
        cache_bytes: int,
        workers: int | None,
        feature_width: int | None = None,
    ) -> None:
        """`workers`: threads for the images of one prompt; None: one a core, at most 8.

        `feature_width`: of the rows of an image that may be given in its place; None: not known here.
        """
        if workers is not None and workers < 1:
            raise ValueError(f"workers must be at least 1, not {workers}")
        self._expander = expander
        self._fingerprint = fingerprint
        self._media = media
        self._limits = limits
        self._feature_width = feature_width
        self._workers = workers if workers is not None else min(8, os.cpu_count() or 1)
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self.cache = ExpansionCache(cache_bytes)

    def prepare(
        self, sources: Sequence[Any], options: Mapping[str, object], names: Sequence[str | None]
    ) -> list[PreparedImage]:
        """Load, hash and process the images of one prompt, in their order.

        Raises:
            ProcessorError: Of the first image that fails, saying which one; its kind (MediaError, ...) is kept.
        """
        alone = len(sources) == 1
        if alone or self._workers == 1:
            return [self._numbered(i, sources, options, names) for i in range(len(sources))]
        jobs = [self._executor().submit(self._numbered, i, sources, options, names) for i in range(len(sources))]
        try:
            return [job.result() for job in jobs]
        finally:
            for job in jobs:
                job.cancel()

    def close(self) -> None:
        """End the threads; they start again when needed."""
        with self._lock:
            if self._pool is not None:
                self._pool.shutdown(wait=True, cancel_futures=True)
                self._pool = None

    def _executor(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(
                    self._workers, thread_name_prefix="processors", initializer=use_one_core
                )
            return self._pool

    def _numbered(
        self, index: int, sources: Sequence[Any], options: Mapping[str, object], names: Sequence[str | None]
    ) -> PreparedImage:
        alone = len(sources) == 1
        try:
            return self._prepare(sources[index], options, names[index], alone)
        except ProcessorError as error:
            if alone:
                raise
            raise type(error)(f"image {index + 1} of {len(sources)}: {error}") from error

    def _prepare(self, source: Any, options: Mapping[str, object], name: str | None, alone: bool) -> PreparedImage:
        place = "alone" if alone or not self._expander.company else "in company"
        owner = f"{self._fingerprint}|{place}"
        if isinstance(source, ImageFeatures):
            return self._prepare_features(source, options, name, owner, alone)
        picture = load_picture(source, self._media)
        self._limits.check_picture(options, picture.size, self._media.max_image_pixels)
        mark = image_mark(picture, options, owner) if name is None else None
        kept: Expansion | None = None
        if alone and mark is not None and self._hashes_beside(picture) and self.cache.lacks(mark):
            key, expansion = self._expand_while_hashing(picture, options, owner)
        else:
            key = image_key(picture, options, owner, name)
            kept = self.cache.get(key)
            expansion = kept if kept is not None else self._expander.expand(picture, options, alone)
        self.cache.put(key, expansion, mark)
        return PreparedImage(key, picture.size, expansion, is_new=kept is None)

    def _hashes_beside(self, picture: Picture) -> bool:
        """Whether a hash of the pixels takes so long that another thread is worth asking for it."""
        return self._workers > 1 and len(picture.planes()) >= _LONG_HASH

    def _expand_while_hashing(
        self, picture: Picture, options: Mapping[str, object], owner: str
    ) -> tuple[str, Expansion]:
        """Of an image that is surely not in the cache, so that nothing waits for its key."""
        hashing = self._executor().submit(image_key, picture, options, owner)
        try:
            expansion = self._expander.expand(picture, options, True)
        finally:
            waiting = hashing.cancel()  # all threads are busy with other prompts
        return image_key(picture, options, owner) if waiting else hashing.result(), expansion

    def _prepare_features(
        self, given: ImageFeatures, options: Mapping[str, object], name: str | None, owner: str, alone: bool
    ) -> PreparedImage:
        """An image given as its rows: what stands for it follows from a blank picture of its size."""
        from PIL import Image

        features = own_features(given, self._feature_width, self._media.max_image_pixels)
        self._limits.check_picture(options, features.size, self._media.max_image_pixels)
        key = features_key(features, options, owner, name)
        blank = fingerprint("blank", owner, str(features.size), canonical(options).decode())
        expansion = self.cache.get(blank)
        if expansion is None:
            made = self._expander.expand(Picture(Image.new("RGB", features.size)), options, alone)
            expansion = Expansion(made.text, without_pixels(made.tensors))
            self.cache.put(blank, expansion)
        return PreparedImage(key, features.size, expansion, features)
