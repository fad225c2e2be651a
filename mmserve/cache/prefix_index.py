"""Finds the cache block that holds a known piece of a prompt, and never a wrong one.

The key leads to one candidate. It is a hit only if its content is equal to what is looked for *and* it was
registered after the very block that the search has reached so far. So a collision of keys, even with a hash of
four bits, costs a hit but never an answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from mmserve.cache.prefix_keys import BlockContent, Digest, block_key, root_key, sha256

__all__ = ["CachedBlock", "PrefixIndex"]


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """A block whose content can be found.

    Attributes:
        block: Its number; -1 for the root, which stands before every first block.
        key: Its chained key.
        serial: Never given twice, so that a block that took an evicted one's number or key is not taken for it.
        parent_serial: Serial of the block before it.
        content: What it holds.
    """

    block: int
    key: bytes
    serial: int
    parent_serial: int
    content: BlockContent


class PrefixIndex:
    """Key to block. Knows nothing of who holds a block or when it was used; `BlockPool` does.

    Args:
        identity: Names all that changes keys and values besides the prompt: weights, adapter, dtype.
        digest: Replaced in tests by a weak one.
    """

    def __init__(self, identity: str, digest: Digest = sha256) -> None:
        self._digest = digest
        self._by_key: dict[bytes, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}
        self._children: dict[int, set[int]] = {0: set()}
        self._last_serial = 0
        self.root = CachedBlock(-1, root_key(identity, digest), 0, -1, BlockContent(()))

    def __len__(self) -> int:
        return len(self._by_block)

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    def find(self, parent: CachedBlock, content: BlockContent) -> CachedBlock | None:
        """The block that holds `content` after `parent`, or None."""
        return self._verified(block_key(parent.key, content, self._digest), parent, content)

    def insert(self, parent: CachedBlock, content: BlockContent, block: int) -> CachedBlock | None:
        """Register `block`, whose keys and values have been written, as holding `content` after `parent`.

        Returns the entry that holds this content from now on: that of another block if one was there first.
        None if `parent` has been forgotten, or the key is taken by other content (two digests collide); then
        nothing can be registered after it either.
        """
        if parent.serial not in self._children:
            return None
        key = block_key(parent.key, content, self._digest)
        if known := self._verified(key, parent, content):
            return known
        if key in self._by_key or block in self._by_block:
            return None
        self._last_serial += 1
        entry = CachedBlock(block, key, self._last_serial, parent.serial, content)
        self._by_key[key] = entry
        self._by_block[block] = entry
        self._children[entry.serial] = set()
        self._children[parent.serial].add(block)
        return entry

    def forget(self, block: int) -> list[int]:
        """Drop the entry of `block` and of all that were registered after it: they could not be reached.

        Returns their blocks; empty if `block` has no entry.
        """
        first = self._by_block.get(block)
        if first is None:
            return []
        if first.parent_serial in self._children:
            self._children[first.parent_serial].discard(block)
        forgotten, queue = [], [block]
        while queue:
            entry = self._by_block.pop(queue.pop())
            del self._by_key[entry.key]
            queue += self._children.pop(entry.serial)
            forgotten.append(entry.block)
        return forgotten

    def check_integrity(self) -> None:
        """The maps hold the same entries, and every entry can be reached from the root.

        Raises:
            RuntimeError: They do not.
        """
        if {e.serial for e in self._by_key.values()} != {e.serial for e in self._by_block.values()}:
            raise RuntimeError("entries by key and entries by block differ")
        for block, entry in self._by_block.items():
            if entry.block != block or self._by_key.get(entry.key) is not entry:
                raise RuntimeError(f"the entry of block {block} is filed under another block or key")
            if block not in self._children.get(entry.parent_serial, ()):
                raise RuntimeError(f"the entry of block {block} can not be reached from the root")
        if sum(map(len, self._children.values())) != len(self._by_block):
            raise RuntimeError("a block without an entry is somebody's child")

    def _verified(self, key: bytes, parent: CachedBlock, content: BlockContent) -> CachedBlock | None:
        entry = self._by_key.get(key)
        if entry is None or entry.parent_serial != parent.serial or entry.content != content:
            return None
        return entry
