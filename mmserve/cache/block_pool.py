"""Cache blocks by number: who holds them, which may be reused, which are worth keeping. No tensors.

Every block is in exactly one of three places::

    free      nobody holds it and nothing in it is worth finding     a stack: the hottest memory is reused first
    cached    nobody holds it, its content can still be found        least recently used first
    held      `refcount` sequences read it (more than one: shared)

    allocate        free   -> held (refcount 1)
    share           held   -> held (refcount + 1),   cached -> held (refcount 1)
    release         held   -> refcount - 1, at zero: cached if `keep` was called for it, else free
    evict           cached -> free, oldest first; the caller forgets what they held
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

__all__ = ["BlockPool"]


class BlockPool:
    """A fixed number of blocks; every operation takes constant time a block.

    Args:
        num_blocks: Blocks, numbered from 0.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._refcounts = [0] * num_blocks
        self._kept = bytearray(num_blocks)
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out at once."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that `evict` can make free."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self.num_available

    def refcount(self, block: int) -> int:
        """How many hold `block`."""
        return self._refcounts[block]

    def is_kept(self, block: int) -> bool:
        """Whether the content of `block` can be found again."""
        return bool(self._kept[block])

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each with a refcount of 1.

        Raises:
            RuntimeError: Fewer are free. Nothing was taken; `evict` first.
        """
        if count > len(self._free):
            raise RuntimeError(
                f"{count} blocks wanted, {len(self._free)} free; evict some of {len(self._cached)} cached"
            )
        if count == 0:
            return []
        blocks = self._free[-count:]
        blocks.reverse()
        del self._free[-count:]
        for block in blocks:
            self._refcounts[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Hold blocks that others hold, or that are cached, once more.

        Raises:
            RuntimeError: A block is free: its content is gone.
        """
        for block in blocks:
            if self._refcounts[block] == 0:
                if block not in self._cached:
                    raise RuntimeError(f"block {block} is free and can not be shared")
                del self._cached[block]
            self._refcounts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Let go of blocks. Give a sequence's last block first: then its tail is evicted before its head.

        Raises:
            RuntimeError: A block is not held.
        """
        for block in blocks:
            count = self._refcounts[block]
            if count == 0:
                raise RuntimeError(f"block {block} was released but nobody holds it")
            self._refcounts[block] = count - 1
            if count > 1:
                continue
            if self._kept[block]:
                self._cached[block] = None
            else:
                self._free.append(block)

    def keep(self, block: int) -> None:
        """Once nobody holds `block`, keep it cached rather than free.

        Raises:
            RuntimeError: The block is not held.
        """
        if self._refcounts[block] == 0:
            raise RuntimeError(f"block {block} is not held, so nobody can vouch for its content")
        self._kept[block] = 1

    def forget(self, block: int) -> None:
        """The content of `block` can not be found any more: undo `keep`; a cached block becomes free."""
        self._kept[block] = 0
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def evict(self, count: int) -> list[int]:
        """Make the `count` least recently used cached blocks free (fewer if there are fewer) and return them."""
        evicted = []
        for _ in range(min(count, len(self._cached))):
            block, _ = self._cached.popitem(last=False)
            self._kept[block] = 0
            self._free.append(block)
            evicted.append(block)
        return evicted

    def check_integrity(self) -> None:
        """Every block is in one place, and says so.

        Raises:
            RuntimeError: With the first contradiction found.
        """
        free = set(self._free)
        if len(free) != len(self._free):
            raise RuntimeError("a block is free twice")
        if both := free & self._cached.keys():
            raise RuntimeError(f"blocks {sorted(both)} are free and cached")
        held = sum(count > 0 for count in self._refcounts)
        if len(free) + len(self._cached) + held != self.num_blocks:
            raise RuntimeError(f"{len(free)} free + {len(self._cached)} cached + {held} held != {self.num_blocks}")
        for block in free:
            if self._refcounts[block] or self._kept[block]:
                raise RuntimeError(f"block {block} is free but held or kept")
        for block in self._cached:
            if self._refcounts[block] or not self._kept[block]:
                raise RuntimeError(f"block {block} is cached but held, or not kept")
