"""Cache groups: layers that look equally far back share block tables. No tensors.

A layer with a sliding window reads its last `window` keys and never again what lies before them, so its blocks can
go while the request runs on. Layers that see everything need theirs to the end. Every group holds equally many
layers, so a block of the one pool serves whichever group needs it next::

    tokens        0-3   4-7   8-11  12-15     13 computed, window 5: the next query reads keys 9 to 13
    no window   [  5  |  2  |  9  |  0  ]
    window 5    [  -  |  -  |  3  |  1  ]     blocks of tokens 0-7 were given back when token 12 had been computed
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NO_BLOCK", "CacheGroup"]

NO_BLOCK = -1
"""In a block table: no query that is still to come reads what was here."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers with block tables of their own. A query sees itself and the `window - 1` keys before it; None: all."""

    window: int | None = None

    def first_needed(self, num_computed: int, block_size: int) -> int:
        """Number in the table of the first block that tokens from `num_computed` on read or write."""
        return 0 if self.window is None else max(0, num_computed - self.window + 1) // block_size

    def most_blocks(self, num_tokens: int, chunk: int, block_size: int) -> int:
        """Most blocks that a request of `num_tokens` holds at once, computed in chunks of at most `chunk` tokens."""
        whole = -(-num_tokens // block_size)
        if self.window is None:
            return whole
        # Before the first token of a chunk lie window - 1 keys, and neither end need be a block's.
        return min(whole, -(-(self.window - 1 + chunk) // block_size) + 1)
