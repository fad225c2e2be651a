"""Processed images by content key: bounded in bytes, least recently used first out, safe for threads.

An entry is a whole answer, and losing one costs only the time to make it again: a miss is never an error.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass

from processors.expand import Expansion

__all__ = ["ExpansionCache"]

_ENTRY_BYTES = 1024
"""What an entry takes beside its tensors and its text, about."""


@dataclass(frozen=True, slots=True)
class _Entry:
    expansion: Expansion
    nbytes: int
    mark: bytes | None


class ExpansionCache:
    """Expansions by key. Tensors are handed out as they are: nobody may write to them."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes` of expansions are kept; 0 keeps nothing."""
        if max_bytes < 0:
            raise ValueError(f"max_bytes must not be negative, not {max_bytes}")
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._marks: Counter[bytes] = Counter()
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
                return None
            self._hits += 1
            self._entries.move_to_end(key)
            return found.expansion

    def lacks(self, mark: bytes) -> bool:
        """Whether no entry has this mark: then `get` would find nothing, which is counted as if it had been called.

        A mark is cheap to make, and entries of equal content have equal marks (but not the other way round).
        """
        with self._lock:
            if mark in self._marks:
                return False
            self._misses += 1
            return True

    def put(self, key: str, expansion: Expansion, mark: bytes | None = None) -> None:
        """Keep an expansion, letting go of the least recently used. One larger than the whole cache is not kept."""
        size = expansion.nbytes() + len(expansion.text) + _ENTRY_BYTES
        with self._lock:
            if size > self._max_bytes or key in self._entries:
                return
            self._entries[key] = _Entry(expansion, size, mark)
            self._bytes += size
            if mark is not None:
                self._marks[mark] += 1
            while self._bytes > self._max_bytes:
                self._let_go(self._entries.popitem(last=False)[1])

    def _let_go(self, entry: _Entry) -> None:
        self._bytes -= entry.nbytes
        if entry.mark is not None:
            self._marks[entry.mark] -= 1
            if not self._marks[entry.mark]:
                del self._marks[entry.mark]

    def clear(self) -> None:
        """Let go of everything."""
        with self._lock:
            self._entries.clear()
            self._marks.clear()
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
