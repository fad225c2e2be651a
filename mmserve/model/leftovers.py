"""Names in weight files that no model reads any more, and which may be left over.

A name is a leftover by how it begins, how it ends, or what is in it. All others that the model has no place for
are an error: a weight that is not loaded is a model that is not the one that was trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from mmserve.errors import ConfigError

__all__ = ["KNOWN", "Leftovers"]


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What may be left over: names that begin with, end with, hold, or are one of these."""

    prefixes: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = ()
    substrings: tuple[str, ...] = ()
    names: frozenset[str] = frozenset()

    @staticmethod
    def parse(patterns: Iterable[str]) -> Leftovers:
        """From a user's patterns: `mtp.*` begins so, `*.inv_freq` ends so, `*talker*` holds it, else the very name.

        Raises:
            ConfigError: A pattern has a star elsewhere than at its ends, or is nothing but stars.
        """
        prefixes: list[str] = []
        suffixes: list[str] = []
        substrings: list[str] = []
        names: list[str] = []
        for pattern in patterns:
            core = pattern.removeprefix("*").removesuffix("*")
            if not core or "*" in core:
                raise ConfigError(
                    f"{pattern!r} is no pattern of weight names; known: 'begins*', '*ends', '*holds*', 'the.whole.name'"
                )
            kind = {(False, False): names, (False, True): prefixes, (True, False): suffixes, (True, True): substrings}
            kind[pattern.startswith("*"), pattern.endswith("*")].append(core)
        return Leftovers(tuple(prefixes), tuple(suffixes), tuple(substrings), frozenset(names))

    def match(self, name: str) -> str | None:
        """The pattern that `name` is a leftover by, or None."""
        if name in self.names:
            return name
        for prefix in self.prefixes:
            if name.startswith(prefix):
                return f"{prefix}*"
        for suffix in self.suffixes:
            if name.endswith(suffix):
                return f"*{suffix}"
        return next((f"*{part}*" for part in self.substrings if part in name), None)

    @staticmethod
    def first_match(name: str, several: Sequence[Leftovers]) -> str | None:
        """The first pattern of `several` lists that `name` is a leftover by."""
        return next((pattern for each in several if (pattern := each.match(name)) is not None), None)


KNOWN: Final = Leftovers(
    suffixes=(
        # Tables that rotary embeddings compute: once stored with every layer.
        "rotary_emb.inv_freq",
        "rotary_emb.cos_cached",
        "rotary_emb.sin_cached",
        "rotary_pos_emb.inv_freq",
        # 0, 1, 2, ...: buffers of CLIP, SigLIP and BERT that were once stored.
        ".position_ids",
        # Causal masks of GPT-2 and GPT-NeoX that were once stored.
        ".attn.masked_bias",
        ".attention.masked_bias",
        # A counter of batch norms, read in training.
        ".num_batches_tracked",
        # What TransformerEngine keeps beside its layers for training.
        "._extra_state",
    ),
)
"""What versions of transformers before today's stored; a family's own are the model class's to say."""
