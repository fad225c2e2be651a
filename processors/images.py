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
from processors.hashing import image_key
from processors.limits import OptionLimits
from processors.media import MediaOptions, load_image

__all__ = ["ImagePreparer", "PreparedImage"]


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """One image, ready to be put into a prompt: content key, (width, height) as given, expansion."""

    key: str
    size: tuple[int, int]
    expansion: Expansion


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
    ) -> None:
        """`workers`: threads for the images of one prompt; None: one a core, at most 8."""
        if workers is not None and workers < 1:
            raise ValueError(f"workers must be at least 1, not {workers}")
        self._expander = expander
        self._fingerprint = fingerprint
        self._media = media
        self._limits = limits
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
                self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="processors")
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
        picture = load_image(source, self._media)
        self._limits.check_picture(options, picture.size, self._media.max_image_pixels)
        place = "alone" if alone or not self._expander.company else "in company"
        key = image_key(picture, options, f"{self._fingerprint}|{place}", name)
        expansion = self.cache.get(key)
        if expansion is None:
            expansion = self._expander.expand(picture, options, alone)
            self.cache.put(key, expansion)
        return PreparedImage(key, picture.size, expansion)
