"""One request as the scheduler sees it: counts, blocks and images; no tensors, no text."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace

from mmserve.cache.encoder_ledger import EncodedImage
from mmserve.cache.prefix_index import CachedPiece
from mmserve.cache.prefix_keys import ContentMap

__all__ = ["ImageExtent", "Request", "RequestState"]


class RequestState(enum.Enum):
    """Where a request is in its life: WAITING <-> RUNNING (preemption leads back), then FINISHED."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(frozen=True, slots=True)
class ImageExtent:
    """One image of a prompt.

    Attributes:
        index: Its number among the prompt's images.
        key: Content key.
        first_row, last_row: Absolute positions of its first and last feature row.
        num_rows: Feature rows.
    """

    index: int
    key: str
    first_row: int
    last_row: int
    num_rows: int


@dataclass(eq=False, slots=True)
class Request:
    """Changed by the scheduler only, in its thread.

    Attributes:
        request_id: Unique in the engine.
        order: Place in line, lower first: (effective arrival, arrival, number among the answers to one prompt).
        token_ids: Prompt and generated ids; the last one has no keys and values yet.
        num_prompt: Length of the expanded prompt.
        images: Those that take rows, in prompt order.
        spans: Both-way spans, ascending.
        content: Gives the content of a block, for its key.
        reads_prefix, writes_prefix: Whether its blocks may come from, and go to, the prefix index.
        state: Where it is.
        num_computed: Tokens whose keys and values are in its blocks.
        tables: Its blocks in order, a table a cache group; empty while it waits.
        num_cached: Prompt tokens found in the prefix index when it first ran.
        num_preemptions: How often it lost its blocks.
        chain: Index entry of its last registered piece; None: nothing can be registered any more.
        num_registered: Pieces that have passed through `PrefixIndex.insert` or came from it.
        held: Position in `images` -> ledger entry, from the step that needs it first until its last row is computed.
        next_image: First image that has rows still to be computed.
        started: Whether the runner knows it.
        proven: Whether finite logits have come from what is in its blocks; if not, there may be NaN in them.
        chunk_limit: Most tokens of a chunk of its prompt, if it has a limit of its own.
        forks: Ids of further answers, until they have begun.
    """

    request_id: str
    order: tuple[int, int, int]
    token_ids: list[int]
    num_prompt: int
    images: tuple[ImageExtent, ...]
    spans: tuple[tuple[int, int], ...]
    content: ContentMap
    reads_prefix: bool = True
    writes_prefix: bool = True
    state: RequestState = RequestState.WAITING
    num_computed: int = 0
    tables: list[list[int]] = field(default_factory=list)
    num_cached: int = 0
    num_preemptions: int = 0
    chain: CachedPiece | None = None
    num_registered: int = 0
    held: dict[int, EncodedImage] = field(default_factory=dict)
    next_image: int = 0
    started: bool = False
    proven: bool = False
    chunk_limit: int | None = None
    forks: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and generated."""
        return len(self.token_ids)

    @property
    def num_missing(self) -> int:
        """Known tokens that are not computed yet."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_seats(self) -> int:
        """Places among the running ones that it takes: its own, and those of forks to come."""
        return 1 + len(self.forks)

    def fork(self, number: int) -> Request:
        """Further answer `number` (from 1), as it begins: it has computed all that this request has."""
        return replace(
            self,
            request_id=self.forks[number - 1],
            order=(*self.order[:2], number),
            token_ids=list(self.token_ids),
            tables=[list(table) for table in self.tables],
            held={},
            forks=(),
        )
