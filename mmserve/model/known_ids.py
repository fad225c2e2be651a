"""Ids that a model can look up."""

from __future__ import annotations

from mmserve.errors import InputError
from processors.types import ProcessedPrompt

__all__ = ["check_known_ids"]


def check_known_ids(prompt: ProcessedPrompt, num_embeddings: int) -> None:
    """Whether every id that is looked up lies in a table of `num_embeddings`; where an image's row goes, none is.

    Raises:
        InputError: One does not; says which, and where.
    """
    covered = {position for image in prompt.images for position in image.range.embed_positions()}
    for position, token in enumerate(prompt.token_ids):
        if not 0 <= token < num_embeddings and position not in covered:
            raise InputError(
                f"token {token} at index {position} is not in the model's table of "
                f"{num_embeddings} embeddings, and no image stands there"
            )
