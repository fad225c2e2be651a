"""Where an image's text came to lie -> a `PlaceholderRange`, and the token types of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from processors.errors import PromptError
from processors.types import PlaceholderRange

__all__ = ["TypeRule", "range_from_ids"]


def range_from_ids(token_ids: Sequence[int], span: tuple[int, int], feature_token_id: int | None) -> PlaceholderRange:
    """The range of one image, whose text became `token_ids[span[0]:span[1]]`; `feature_token_id` None: without rows.

    Only positions inside the span are looked at, so the same id elsewhere (typed by a user) means nothing.

    Raises:
        PromptError: No position of the span takes a feature row.
    """
    start, end = span
    if feature_token_id is None:
        return PlaceholderRange(start, end - start, (False,) * (end - start))
    flags = tuple(token_id == feature_token_id for token_id in token_ids[start:end])
    if not any(flags):
        raise PromptError(f"no token of an image (ids {start} to {end - 1}) takes a feature row")
    return PlaceholderRange(start, end - start, None if all(flags) else flags)


@dataclass(frozen=True, slots=True)
class TypeRule:
    """Which tokens of an image's range have the type 1.

    Attributes:
        kind: "ids", those with one of `ids`; "span", all of them; "none", the family has no token types.
        ids: The ids that the processor counts as image tokens.
    """

    kind: Literal["ids", "span", "none"]
    ids: frozenset[int] = frozenset()

    def count(self, token_ids: Sequence[int], span: tuple[int, int]) -> int:
        """Tokens of one span that have the type 1."""
        start, end = span
        if self.kind == "none":
            return 0
        return end - start if self.kind == "span" else sum(i in self.ids for i in token_ids[start:end])

    def types(self, token_ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        """One type a token: 1 in the images' spans by this rule, 0 everywhere else; empty for "none"."""
        if self.kind == "none":
            return ()
        types = [0] * len(token_ids)
        for start, end in spans:
            for index in range(start, end):
                types[index] = int(self.kind == "span" or token_ids[index] in self.ids)
        return tuple(types)
