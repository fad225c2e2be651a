"""The books of cache blocks: which blocks a request has, which it can take over, which others may take over from it.

A request of 10 tokens, blocks of 4, whose first 8 tokens were computed before by another request::

    tokens             0-3 4-7 8-9
    table of group 0   [ 5 | 2 | 9 ]      5 and 2 found in the prefix index and shared, 9 newly taken
    a window of 3      [ - | 2 | 7 ]      the first query, token 8, sees keys 6 to 8

At least its last token is left to compute, for its logits are what the request is about.

A group without a window gets blocks for all known tokens when a request starts, so that what has begun can go on. A
group with a window gets them chunk by chunk, and gives them back as its window moves on; any group may have them next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from mmserve.cache.block_pool import BlockPool
from mmserve.cache.groups import NO_BLOCK, CacheGroup
from mmserve.cache.prefix_index import CachedPiece, PrefixIndex
from mmserve.engine.batch import BlockCopy
from mmserve.engine.request import Request
from mmserve.engine.spans import before_span

__all__ = ["BlockBooks"]


class BlockBooks:
    """The block pool, the prefix index, and what requests have of them.

    Args:
        num_blocks: Blocks of the pool.
        groups: The cache's groups. If any has no window, the first has none.
        block_size: Tokens in a block.
        index: Finds blocks by content; None: nothing is shared. Made for these groups.
    """

    def __init__(
        self, num_blocks: int, groups: Sequence[CacheGroup], block_size: int, index: PrefixIndex | None
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.groups = tuple(groups)
        self.block_size = block_size
        self._index = index
        self._windowed = tuple(number for number, group in enumerate(groups) if group.window is not None)
        self._nothing: tuple[tuple[int, ...], ...] = ((),) * len(self.groups)
        self._scrubs: dict[int, None] = {}
        self._doubtful: set[int] = set()

    def most(self, num_tokens: int, chunk: int) -> int:
        """Most blocks that a request of `num_tokens` holds at once, computed in chunks of at most `chunk` tokens."""
        return sum(group.most_blocks(num_tokens, chunk, self.block_size) for group in self.groups)

    def missing(self, request: Request, stop: int) -> int:
        """Blocks that a request needs more to compute up to `stop`; copies of shared ones included."""
        missing = 0
        for group, table in enumerate(request.tables):
            missing += self._wanted(request, group, stop) - len(table) + self._writes_shared(request, table)
        return missing

    def cost(self, request: Request, hits: Sequence[CachedPiece], stop: int) -> int:
        """Blocks fewer available once `request` has started with `hits` to compute up to `stop`."""
        cost = 0
        for group in range(len(self.groups)):
            first = self._first_block(group, len(hits) * self.block_size)
            revived = sum(self.pool.refcount(piece.blocks[group]) == 0 for piece in hits[first:])
            cost += self._wanted(request, group, stop) - len(hits) + revived
        return cost

    def find_prefix(self, request: Request) -> list[CachedPiece]:
        """Pieces that hold the request's beginning, ending outside of its both-way spans.

        Their last ones have a block in every group, as far back as the window of the group reaches.
        """
        pieces: list[CachedPiece] = []
        if self._index is None or not request.reads_prefix:
            return pieces
        size = self.block_size
        piece = self._index.root
        for stop in range(size, request.num_tokens, size):
            found = self._index.find(piece, request.content.content(request.token_ids, stop - size, stop))
            if found is None:
                break
            pieces.append(found)
            piece = found
        best = 0
        rows = [0] * len(self.groups)  # how many of the last pieces have a block there
        for length, piece in enumerate(pieces, 1):
            rows = [row + 1 if block != NO_BLOCK else 0 for row, block in zip(rows, piece.blocks, strict=True)]
            stop = length * size
            if before_span(request.spans, stop) == stop and all(
                row >= length - self._first_block(group, stop) for group, row in enumerate(rows)
            ):
                best = length
        return pieces[:best]

    def start(self, request: Request, hits: Sequence[CachedPiece], stop: int) -> tuple[tuple[int, ...], ...]:
        """Give a request blocks to compute up to `stop`, the first of them shared; returns its whole tables."""
        request.num_computed = len(hits) * self.block_size
        request.num_registered = len(hits)
        request.chain = hits[-1] if hits else self._root(request)
        request.tables = []
        for group in range(len(self.groups)):
            first = self._first_block(group, request.num_computed)
            shared = [piece.blocks[group] for piece in hits[first:]]
            self.pool.share(shared)
            request.tables.append([NO_BLOCK] * first + shared)
        # Only now that all of them are held: what one group takes could be what the search has found for another.
        self.grow(request, stop)
        return tuple(map(tuple, request.tables))

    def own_last(self, request: Request) -> tuple[BlockCopy, ...]:
        """Where the request would write to a block that others read, give it one of its own."""
        index, offset = divmod(request.num_computed, self.block_size)
        if offset == 0:
            return ()
        copies = []
        for group, table in enumerate(request.tables):
            if self._writes_shared(request, table):
                source = table[index]
                (target,) = self._allocate(1)
                self.pool.release((source,))
                table[index] = target
                copies.append(BlockCopy(request.request_id, group, index, source, target))
        return tuple(copies)

    def grow(self, request: Request, stop: int) -> tuple[tuple[int, ...], ...]:
        """Give a running request what it is missing to compute up to `stop`, after `own_last`; returns it by group."""
        grown = self._nothing
        for group, table in enumerate(request.tables):
            missing = self._wanted(request, group, stop) - len(table)
            if missing > 0:
                blocks = self._allocate(missing)
                table += blocks
                grown = (*grown[:group], tuple(blocks), *grown[group + 1 :])
        return grown

    def fork(self, child: Request) -> None:
        """A fork begins with its parent's blocks in its tables: they are shared now."""
        for table in child.tables:
            self.pool.share(block for block in table if block != NO_BLOCK)

    def register(self, request: Request) -> None:
        """Let others find the blocks that are full now: their keys and values have been written."""
        if self._index is None or request.chain is None:
            return
        size = self.block_size
        for number in range(request.num_registered, request.num_computed // size):
            blocks = [table[number] for table in request.tables]
            content = request.content.content(request.token_ids, number * size, (number + 1) * size)
            request.chain = self._index.insert(request.chain, content, blocks)
            request.num_registered += 1
            if request.chain is None:
                return
            for block, kept in zip(blocks, request.chain.blocks, strict=True):
                if block == kept:
                    self.pool.keep(block)

    def give_back(self, request: Request) -> None:
        """Release the blocks that have moved out of the windows of what is still to be computed."""
        for group in self._windowed:
            table = request.tables[group]
            index = self._first_block(group, request.num_computed) - 1
            gone = []
            while index >= 0 and table[index] != NO_BLOCK:
                gone.append(table[index])
                table[index] = NO_BLOCK
                index -= 1
            self.pool.release(reversed(gone))

    def release(self, request: Request) -> None:
        """Take a request's blocks; its tail will be evicted before its head."""
        for table in reversed(request.tables):
            blocks = [block for block in reversed(table) if block != NO_BLOCK]
            if request.proven and self._doubtful:
                self._doubtful.difference_update(blocks)
            last = [] if request.proven else [block for block in blocks if self.pool.refcount(block) == 1]
            self.pool.release(blocks)
            self._doubt(last)
        request.tables = []
        request.num_computed = request.num_registered = 0
        request.chain = None
        request.proven = False

    def disown(self, request: Request) -> None:
        """What is in the request's blocks is not to be trusted: nobody may find it, or what was computed after it."""
        request.proven = False
        for block in [block for table in request.tables for block in table if block != NO_BLOCK]:
            gone = self._forget(block)
            self._doubt((block, *gone))

    def take_scrubs(self, copies: Iterable[BlockCopy]) -> tuple[int, ...]:
        """Blocks to fill with zeros before the next forward, since there may be NaN in them; not what is copied to."""
        scrubs, self._scrubs = self._scrubs, {}
        for copy in copies:
            scrubs.pop(copy.target, None)
        return tuple(scrubs)

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Pool, index and the requests' tables agree.

        Raises:
            RuntimeError: With the first contradiction found.
        """
        self.pool.check_integrity()
        holders = Counter(block for r in requests for table in r.tables for block in table if block != NO_BLOCK)
        for block in range(self.pool.num_blocks):
            if self.pool.refcount(block) != holders[block]:
                raise RuntimeError(f"block {block}: {holders[block]} hold it, counted {self.pool.refcount(block)}")
            if self._index is not None and self.pool.is_kept(block) != (block in self._index):
                raise RuntimeError(f"block {block}: kept and registered differ")
        if self._index is not None:
            self._index.check_integrity()

    # -- inside ---------------------------------------------------------------------------------

    def _first_block(self, group: int, num_computed: int) -> int:
        return self.groups[group].first_needed(num_computed, self.block_size)

    def _wanted(self, request: Request, group: int, stop: int) -> int:
        """Length of the request's table, to compute up to `stop`."""
        return -(-(len(request.token_ids) if self.groups[group].window is None else stop) // self.block_size)

    def _writes_shared(self, request: Request, table: list[int]) -> bool:
        """Whether the next token goes into a block that is not full and that others hold too (a fork's)."""
        index, offset = divmod(request.num_computed, self.block_size)
        return offset > 0 and self.pool.refcount(table[index]) > 1

    def _root(self, request: Request) -> CachedPiece | None:
        return self._index.root if self._index is not None and request.writes_prefix else None

    def _allocate(self, count: int) -> list[int]:
        """Take blocks that are available, evicting cached ones if too few are free."""
        missing = count - self.pool.num_free
        if missing > 0:
            for block in self.pool.evict(missing):
                self._settle_doubt((block, *self._forget(block)))
        blocks = self.pool.allocate(count)
        if self._windowed:
            # Finite logits say nothing of what had moved out of a window, so that every block may hold NaN.
            self._scrubs.update(dict.fromkeys(blocks))
        return blocks

    def _forget(self, block: int) -> list[int]:
        """Nobody finds `block`, or what can not be reached without it, any more; returns all that is gone."""
        gone = [] if self._index is None else self._index.forget(block)
        for other in gone:
            self.pool.forget(other)
        return gone

    def _doubt(self, blocks: Iterable[int]) -> None:
        """There may be NaN in `blocks`: they are scrubbed once nobody holds them or can find them any more."""
        for block in blocks:
            if self.pool.is_kept(block) or self.pool.refcount(block):
                self._doubtful.add(block)
            else:
                self._doubtful.discard(block)
                self._scrubs[block] = None

    def _settle_doubt(self, blocks: Iterable[int]) -> None:
        """`blocks` can not be found any more: scrub those that are free and doubtful."""
        if self._doubtful:
            self._doubt([block for block in blocks if block in self._doubtful])
