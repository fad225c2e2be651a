"""The books of cache blocks: which blocks a request has, which it can take over, which others may take over from it.

A request of 10 tokens, blocks of 4, whose first 8 tokens were computed before by another request::

    block_table   [ 5 | 2 | 9 ]      5 and 2 found in the prefix index and shared, 9 newly taken
    tokens          0-3 4-7 8-9

At least its last token is left to compute, for its logits are what the request is about.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from mmserve.cache.block_pool import BlockPool
from mmserve.cache.prefix_index import CachedBlock, PrefixIndex
from mmserve.engine.batch import BlockCopy
from mmserve.engine.request import Request
from mmserve.engine.spans import before_span

__all__ = ["BlockBooks"]


class BlockBooks:
    """The block pool, the prefix index, and what requests have of them.

    Args:
        num_blocks: Blocks of the cache.
        block_size: Tokens in a block.
        index: Finds blocks by content; None: nothing is shared.
    """

    def __init__(self, num_blocks: int, block_size: int, index: PrefixIndex | None) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self._index = index

    def count(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens take."""
        return -(-num_tokens // self.block_size)

    def missing(self, request: Request) -> int:
        """Blocks that a running request needs more, for the tokens it has now; a copy of a shared one included."""
        return self.count(request.num_tokens) - len(request.block_table) + self._writes_shared(request)

    def cost(self, request: Request, hits: Sequence[CachedBlock]) -> int:
        """Blocks fewer available once `request` has started with `hits`."""
        revived = sum(self.pool.refcount(entry.block) == 0 for entry in hits)
        return self.count(request.num_tokens) - len(hits) + revived

    def find_prefix(self, request: Request) -> list[CachedBlock]:
        """Blocks that hold the request's beginning, ending outside of its both-way spans."""
        hits: list[CachedBlock] = []
        if self._index is None or not request.reads_prefix:
            return hits
        size = self.block_size
        entry = self._index.root
        for stop in range(size, request.num_tokens, size):
            found = self._index.find(entry, request.content.content(request.token_ids, stop - size, stop))
            if found is None:
                break
            hits.append(found)
            entry = found
        while (stop := len(hits) * size) != (cut := before_span(request.spans, stop)):
            del hits[cut // size :]
        return hits

    def start(self, request: Request, hits: Sequence[CachedBlock]) -> None:
        """Give a request blocks for all its tokens, the first of them shared."""
        self.pool.share(entry.block for entry in hits)
        request.block_table = [entry.block for entry in hits]
        request.block_table += self._allocate(self.missing(request))
        request.num_computed = len(hits) * self.block_size
        request.num_registered = len(hits)
        request.chain = hits[-1] if hits else self._root(request)

    def own_last(self, request: Request) -> BlockCopy | None:
        """If the request would write to a block that others read, give it one of its own in that place."""
        if not self._writes_shared(request):
            return None
        index = request.num_computed // self.block_size
        source = request.block_table[index]
        (target,) = self._allocate(1)
        self.pool.release((source,))
        request.block_table[index] = target
        return BlockCopy(request.request_id, index, source, target)

    def grow(self, request: Request) -> tuple[int, ...]:
        """Give a running request the blocks it is missing, after `own_last`; returns them."""
        missing = self.missing(request)
        if missing <= 0:
            return ()
        blocks = self._allocate(missing)
        request.block_table += blocks
        return tuple(blocks)

    def fork(self, child: Request) -> None:
        """A fork begins with its parent's blocks in its table: they are shared now."""
        self.pool.share(child.block_table)

    def register(self, request: Request) -> None:
        """Let others find the blocks that are full now: their keys and values have been written."""
        if self._index is None or request.chain is None:
            return
        size = self.block_size
        for number in range(request.num_registered, request.num_computed // size):
            block = request.block_table[number]
            content = request.content.content(request.token_ids, number * size, (number + 1) * size)
            request.chain = self._index.insert(request.chain, content, block)
            request.num_registered += 1
            if request.chain is None:
                return
            if request.chain.block == block:
                self.pool.keep(block)

    def release(self, request: Request) -> list[int]:
        """Take a request's blocks; its tail will be evicted before its head.

        Returns:
            Those that are free now and may hold NaN: to be filled with zeros before someone else gets them.
        """
        table = request.block_table
        doubtful = () if request.proven else table
        scrub = [block for block in doubtful if self.pool.refcount(block) == 1 and not self.pool.is_kept(block)]
        self.pool.release(reversed(table))
        request.block_table = []
        request.num_computed = request.num_registered = 0
        request.chain = None
        request.proven = False
        return scrub

    def disown(self, request: Request) -> None:
        """What is in the request's blocks is not to be trusted: nobody may find it."""
        request.proven = False
        for block in request.block_table:
            self._forget(block)

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Pool, index and the requests' tables agree.

        Raises:
            RuntimeError: With the first contradiction found.
        """
        self.pool.check_integrity()
        holders: Counter[int] = Counter()
        for request in requests:
            holders.update(request.block_table)
        for block in range(self.pool.num_blocks):
            if self.pool.refcount(block) != holders[block]:
                raise RuntimeError(f"block {block}: {holders[block]} hold it, counted {self.pool.refcount(block)}")
            if self._index is not None and self.pool.is_kept(block) != (block in self._index):
                raise RuntimeError(f"block {block}: kept and registered differ")
        if self._index is not None:
            self._index.check_integrity()

    def _writes_shared(self, request: Request) -> bool:
        """Whether the next token goes into a block that is not full and that others hold too (a fork's)."""
        index, offset = divmod(request.num_computed, self.block_size)
        return offset > 0 and self.pool.refcount(request.block_table[index]) > 1

    def _root(self, request: Request) -> CachedBlock | None:
        return self._index.root if self._index is not None and request.writes_prefix else None

    def _allocate(self, count: int) -> list[int]:
        """Take blocks that are available, evicting cached ones if too few are free."""
        missing = count - self.pool.num_free
        if missing > 0:
            for block in self.pool.evict(missing):
                self._forget(block)
        return self.pool.allocate(count)

    def _forget(self, block: int) -> None:
        """Nobody finds `block`, or what was computed after it, any more."""
        if self._index is not None:
            for gone in self._index.forget(block):
                self.pool.forget(gone)
