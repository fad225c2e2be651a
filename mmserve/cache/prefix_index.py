"""Finds the cache blocks that hold a known piece of a prompt, and never wrong ones.

The key leads to one candidate. It is a hit only if its content is equal to what is looked for *and* it was
registered after the very piece that the search has reached so far. So a collision of keys, even with a hash of
four bits, costs a hit but never an answer.

A piece has a block in each cache group, or had one: those of groups with a window go sooner. Pieces are a tree::

    root -- A -- B -- C        group 0 (all keys)      5  2  9
                  \\-- D       group 1 (a window)      .  7  1      A's is gone: what needs it is no hit

If the first group has no window, a piece without a block there ends every search, so it goes with all after it.
Else a piece stays for as long as it, or one after it, has any block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmserve.cache.groups import NO_BLOCK
from mmserve.cache.prefix_keys import BlockContent, Digest, block_key, root_key, sha256

__all__ = ["CachedPiece", "PrefixIndex"]


@dataclass(frozen=True, slots=True, eq=False)
class CachedPiece:
    """A piece of a prompt, as long as a block, that can be found.

    Attributes:
        key: Its chained key.
        serial: Never given twice, so that a piece that took a forgotten one's key is not taken for it.
        parent_serial: Serial of the piece before it.
        content: What it holds.
        blocks: Where its keys and values are, a number a group; NO_BLOCK where they are no more. Changed by the index.
    """

    key: bytes
    serial: int
    parent_serial: int
    content: BlockContent
    blocks: list[int]


class PrefixIndex:
    """Key to piece. Knows nothing of who holds a block or when it was used; `BlockPool` does.

    Args:
        identity: Names all that changes keys and values besides the prompt: weights, adapter, dtype.
        digest: Replaced in tests by a weak one.
        num_groups: Cache groups.
        rooted: Whether the first group has no window, so that a search needs each piece's block there.
    """

    def __init__(self, identity: str, digest: Digest = sha256, *, num_groups: int = 1, rooted: bool = True) -> None:
        self._digest = digest
        self._rooted = rooted
        self._by_key: dict[bytes, CachedPiece] = {}
        self._by_block: dict[int, tuple[CachedPiece, int]] = {}  # piece and group; no two groups share a block
        self._by_serial: dict[int, CachedPiece] = {}
        self._children: dict[int, set[int]] = {0: set()}
        self._last_serial = 0
        self.root = CachedPiece(root_key(identity, digest), 0, -1, BlockContent(()), [NO_BLOCK] * num_groups)

    def __len__(self) -> int:
        return len(self._by_serial)

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    def find(self, parent: CachedPiece, content: BlockContent) -> CachedPiece | None:
        """The piece that holds `content` after `parent`, or None."""
        return self._verified(block_key(parent.key, content, self._digest), parent, content)

    def insert(self, parent: CachedPiece, content: BlockContent, blocks: Sequence[int]) -> CachedPiece | None:
        """Register `blocks` (one a group), whose keys and values have been written, as `content` after `parent`.

        Returns the piece that holds this content from now on: one that was there first keeps the blocks it has, and
        takes those that it lacks. None if `parent` has been forgotten, or the key is taken by other content (two
        digests collide); then nothing can be registered after it either.
        """
        if parent.serial not in self._children:
            return None
        key = block_key(parent.key, content, self._digest)
        piece = self._verified(key, parent, content)
        new = [block != NO_BLOCK and block not in self._by_block for block in blocks]
        if piece is None:
            if key in self._by_key or not (new[0] if self._rooted else any(new)):
                return None
            self._last_serial += 1
            piece = CachedPiece(key, self._last_serial, parent.serial, content, [NO_BLOCK] * len(blocks))
            self._by_key[key] = self._by_serial[piece.serial] = piece
            self._children[piece.serial] = set()
            self._children[parent.serial].add(piece.serial)
        for group, block in enumerate(blocks):
            if new[group] and piece.blocks[group] == NO_BLOCK:
                piece.blocks[group] = block
                self._by_block[block] = (piece, group)
        return piece

    def forget(self, block: int) -> list[int]:
        """Drop a block, and all that can not be reached without it.

        Returns the blocks that were dropped; empty if `block` can not be found.
        """
        if block not in self._by_block:
            return []
        piece, group = self._by_block[block]
        if self._rooted and group == 0:
            self._children[piece.parent_serial].discard(piece.serial)
            return self._drop_tree(piece)
        del self._by_block[block]
        piece.blocks[group] = NO_BLOCK
        self._drop_bare(piece)
        return [block]

    def check_integrity(self) -> None:
        """The maps hold the same pieces, and every piece can be reached from the root.

        Raises:
            RuntimeError: They do not.
        """
        if {p.serial for p in self._by_key.values()} != self._by_serial.keys():
            raise RuntimeError("pieces by key and pieces by serial differ")
        filed = sum(block != NO_BLOCK for piece in self._by_serial.values() for block in piece.blocks)
        if filed != len(self._by_block):
            raise RuntimeError("pieces name other blocks than those that are filed")
        for piece in self._by_serial.values():
            self._check_piece(piece)
        if sum(map(len, self._children.values())) != len(self._by_serial):
            raise RuntimeError("a piece that is not there is somebody's child")

    def _check_piece(self, piece: CachedPiece) -> None:
        if self._by_key.get(piece.key) is not piece:
            raise RuntimeError(f"piece {piece.serial} is filed under another key")
        if piece.serial not in self._children.get(piece.parent_serial, ()):
            raise RuntimeError(f"piece {piece.serial} can not be reached from the root")
        for group, block in enumerate(piece.blocks):
            if block != NO_BLOCK and self._by_block.get(block) != (piece, group):
                raise RuntimeError(f"block {block} is filed under another piece, or another group than {group}")
        if self._rooted and piece.blocks[0] == NO_BLOCK:
            raise RuntimeError(f"piece {piece.serial} has no block in the first group")
        if self._is_bare(piece):
            raise RuntimeError(f"piece {piece.serial} has no block and none after it")

    def _verified(self, key: bytes, parent: CachedPiece, content: BlockContent) -> CachedPiece | None:
        piece = self._by_key.get(key)
        if piece is None or piece.parent_serial != parent.serial or piece.content != content:
            return None
        return piece

    def _is_bare(self, piece: CachedPiece) -> bool:
        return not self._children[piece.serial] and all(block == NO_BLOCK for block in piece.blocks)

    def _drop_tree(self, first: CachedPiece) -> list[int]:
        """Drop a piece and all after it; returns their blocks."""
        dropped, queue = [], [first]
        while queue:
            piece = queue.pop()
            queue += [self._by_serial[serial] for serial in self._children.pop(piece.serial)]
            del self._by_key[piece.key], self._by_serial[piece.serial]
            for group, block in enumerate(piece.blocks):
                if block != NO_BLOCK:
                    del self._by_block[block]
                    dropped.append(block)
                    piece.blocks[group] = NO_BLOCK
        return dropped

    def _drop_bare(self, piece: CachedPiece) -> None:
        """Drop a piece that nothing is left of, and those before it that led only to it."""
        while piece.serial and self._is_bare(piece):
            del self._children[piece.serial], self._by_key[piece.key], self._by_serial[piece.serial]
            self._children[piece.parent_serial].discard(piece.serial)
            piece = self._by_serial.get(piece.parent_serial, self.root)
