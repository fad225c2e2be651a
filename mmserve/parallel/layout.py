"""Who is who: the ranks of an engine, in rows of stages and columns of tensor ranks.

Four ranks with `tensor_parallel=2, pipeline_parallel=2`; the driver is rank 0, the user's own process::

                 tensor rank 0   tensor rank 1
    stage 0      rank 0          rank 1          tower, embedding, first layers
    stage 1      rank 2          rank 3          last layers, norm, head
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Layout", "Place"]


@dataclass(frozen=True, slots=True)
class Layout:
    """How many ranks each layer is spread over, and how many stages the layers are dealt to; each at least 1."""

    tensor: int = 1
    pipeline: int = 1

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.tensor * self.pipeline

    def place(self, rank: int) -> Place:
        """Where `rank` stands."""
        return Place(self, *divmod(rank, self.tensor))


@dataclass(frozen=True, slots=True)
class Place:
    """One rank's stage and place in it."""

    layout: Layout
    stage: int
    tensor_rank: int

    @property
    def rank(self) -> int:
        """Among all ranks."""
        return self.stage * self.layout.tensor + self.tensor_rank

    @property
    def is_first(self) -> bool:
        """Whether pictures and ids come in here."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether logits come out here."""
        return self.stage == self.layout.pipeline - 1

    @property
    def samples(self) -> bool:
        """Whether tokens are chosen here: one rank, for all."""
        return self.is_last and self.tensor_rank == 0
