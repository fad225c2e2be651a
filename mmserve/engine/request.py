"""One request as the scheduler sees it: counts, blocks and images; no tensors, no text."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from mmserve.cache.encoder_ledger import EncodedImage
from mmserve.cache.prefix_index import CachedBlock
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
        start, stop: Its placeholder range, half-open.
        first_row, last_row: Absolute positions of its first and last feature row.
        num_rows: Feature rows.
    """

    index: int
    key: str
    start: int
    stop: int
    first_row: int
    last_row: int
    num_rows: int


@dataclass(eq=False, slots=True)
class Request:
    """Changed by the scheduler only, in its thread.

    Attributes:
        request_id: Unique in the engine.
        order: Place in line, lower first: (effective arrival, arrival).
        token_ids: Prompt and generated ids; the last one has no keys and values yet.
        num_prompt: Length of the expanded prompt.
        images: Those that take rows, in prompt order.
        spans: Both-way spans, ascending.
        content: Gives the content of a block, for its key.
        shareable: Whether its blocks may come from, and go to, the prefix index.
        state: Where it is.
        num_computed: Tokens whose keys and values are in its blocks.
        block_table: Its blocks, in order.
        num_cached: Prompt tokens found in the prefix index when it first ran.
        num_preemptions: How often it lost its blocks.
        chain: Index entry of its last registered block; None: nothing can be registered any more.
        num_registered: Blocks that have passed through `PrefixIndex.insert` or came from it.
        held: Position in `images` -> ledger entry, from the step that needs it first until its last row is computed.
        next_image: First image that has rows still to be computed.
        started: Whether the runner knows it.
    """

    request_id: str
    order: tuple[int, int]
    token_ids: list[int]
    num_prompt: int
    images: tuple[ImageExtent, ...]
    spans: tuple[tuple[int, int], ...]
    content: ContentMap
    shareable: bool = True
    state: RequestState = RequestState.WAITING
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)
    num_cached: int = 0
    num_preemptions: int = 0
    chain: CachedBlock | None = None
    num_registered: int = 0
    held: dict[int, EncodedImage] = field(default_factory=dict)
    next_image: int = 0
    started: bool = False

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and generated."""
        return len(self.token_ids)

    @property
    def num_missing(self) -> int:
        """Known tokens that are not computed yet."""
        return len(self.token_ids) - self.num_computed
