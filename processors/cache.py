"""Processed images by content key: bounded in bytes, least recently used first out, safe for threads.

An entry is a whole answer, and losing one costs only the time to make it again: a miss is never an error.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from processors.expand import Expansion

__all__ = ["ExpansionCache"]


class ExpansionCache:
    """Expansions by key. Tensors are handed out as they are: nobody may write to them."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes` of tensors are kept; 0 keeps nothing."""
        if max_bytes < 0:
            raise ValueError(f"max_bytes must not be negative, not {max_bytes}")
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, Expansion] = OrderedDict()
        self._bytes = 0
        self._hits = 0
        self._misses = 0
        self._lock = threading.Lock()

    def get(self, key: str) -> Expansion | None:
        """The expansion of `key`, or None."""
        with self._lock:
            found = self._entries.get(key)
            if found is None:
                self._misses += 1
            else:
                self._hits += 1
                self._entries.move_to_end(key)
            return found

    def put(self, key: str, expansion: Expansion) -> None:
        """Keep an expansion, letting go of the least recently used. One larger than the whole cache is not kept."""
        size = expansion.nbytes()
        with self._lock:
            if size > self._max_bytes or key in self._entries:
                return
            self._entries[key] = expansion
            self._bytes += size
            while self._bytes > self._max_bytes:
                _, oldest = self._entries.popitem(last=False)
                self._bytes -= oldest.nbytes()

    def clear(self) -> None:
        """Let go of everything."""
        with self._lock:
            self._entries.clear()
            self._bytes = 0

    def stats(self) -> dict[str, int]:
        """Entries and bytes kept, the limit, hits and misses so far."""
        with self._lock:
            return {
                "entries": len(self._entries),
                "bytes": self._bytes,
                "max_bytes": self._max_bytes,
                "hits": self._hits,
                "misses": self._misses,
            }
