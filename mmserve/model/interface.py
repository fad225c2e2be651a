"""What the engine asks of a model: the seam that a real model, a mock and a reference path all fill.

Letters: T tokens of a packed batch, P position rows (1, or 3 for M-RoPE), W hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from mmserve.attention.interface import AttentionMetadata, LayerCache
from processors.types import ImageItem, ProcessedPrompt

if TYPE_CHECKING:
    import torch

__all__ = [
    "CacheLayout",
    "CacheSpec",
    "ImageRows",
    "LayerCacheSpec",
    "Model",
    "PackedBatch",
    "PromptPlan",
    "RowPlacement",
    "SequenceInput",
]

MOST_GROUPS = 8
"""Cache groups: each costs the host a block table a request."""


@dataclass(frozen=True, slots=True)
class LayerCacheSpec:
    """Shape of one layer's cache: num_kv_heads K, head_size D, value_size Dv.

    `window`: no query reads keys more than `window - 1` before its chunk's first one; None: all may be read.
    """

    num_kv_heads: int
    head_size: int
    value_size: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """How layers share the blocks of one pool.

    Attributes:
        windows: The window of each cache group; if any is None, the first.
        places: (group, slot) of each layer. Layers of one slot, one of each group, share a tensor.
        num_slots: Layers of a group; a group may leave some unused.
    """

    windows: tuple[int | None, ...]
    places: tuple[tuple[int, int], ...]
    num_slots: int


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """All layers that keep keys and values, in cache order, and the dtype they are kept in.

    Attributes:
        kept_elsewhere: Bytes a token that the model keeps outside of these layers: they count where blocks are counted.
        windows: Of the cache groups, where these layers are a part of a model's and all parts go by the same block
            tables; None: these are all layers, and they say which groups there are.
    """

    layers: tuple[LayerCacheSpec, ...]
    dtype: torch.dtype
    kept_elsewhere: int = 0
    windows: tuple[int | None, ...] | None = None

    def layout(self) -> CacheLayout:
        """Layers by window, in groups of equally many: as many as the rarest kind has, but at most MOST_GROUPS groups.

        If layers differ in shape, they can not take each other's place: all are one group, which gives nothing back.
        Where the groups are given by `windows`, each kind's layers are dealt evenly to the groups of their window.
        """
        if self.windows is not None:
            return self._dealt_to(self.windows)
        if len({replace(layer, window=None) for layer in self.layers}) > 1:
            return CacheLayout((None,), tuple((0, slot) for slot in range(len(self.layers))), len(self.layers))
        kinds: dict[int | None, list[int]] = {}
        for number, layer in enumerate(self.layers):
            kinds.setdefault(layer.window, []).append(number)
        num_slots = min(map(len, kinds.values()))
        while sum(-(-len(kind) // num_slots) for kind in kinds.values()) > MOST_GROUPS:
            num_slots += 1
        windows: list[int | None] = []
        places = {}
        for window in sorted(kinds, key=lambda w: (w is not None, -(w or 0))):
            for first in range(0, len(kinds[window]), num_slots):
                members = kinds[window][first : first + num_slots]
                places.update({layer: (len(windows), slot) for slot, layer in enumerate(members)})
                windows.append(window)
        return CacheLayout(tuple(windows), tuple(places[number] for number in range(len(self.layers))), num_slots)

    def _dealt_to(self, windows: tuple[int | None, ...]) -> CacheLayout:
        groups: dict[int | None, list[int]] = {}
        for group, window in enumerate(windows):
            groups.setdefault(window, []).append(group)
        places: dict[int, tuple[int, int]] = {}
        for window, own in groups.items():
            kind = [i for i, layer in enumerate(self.layers) if layer.window == window or windows == (None,)]
            each = -(-len(kind) // len(own))
            places.update({layer: (own[at // each], at % each) for at, layer in enumerate(kind)})
        num_slots = max((slot + 1 for _, slot in places.values()), default=0)
        return CacheLayout(windows, tuple(places[number] for number in range(len(self.layers))), num_slots)

    def bytes_per_token(self) -> int:
        """Bytes that one token takes: over all layers, and elsewhere."""
        values = sum(layer.num_kv_heads * (layer.head_size + layer.value_size) for layer in self.layers)
        return values * self.dtype.itemsize + self.kept_elsewhere

    def slot_bytes(self) -> int:
        """Bytes that one token takes in a block of the pool: the layers of one group; and what is kept elsewhere."""
        layout = self.layout()
        largest = {slot: layer for layer, (_, slot) in zip(self.layers, layout.places, strict=True)}
        values = sum(layer.num_kv_heads * (layer.head_size + layer.value_size) for layer in largest.values())
        return values * self.dtype.itemsize + self.kept_elsewhere


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """What a model computes once from a whole prompt; belongs to the request.

    Attributes:
        positions: int64 [P, T]; column i is the position of prompt token i.
        delta: A token at index i >= T (generated) stands at position i + delta in every row.
        spans: Absolute half-open ranges that attend both ways: never cut by a chunk or a cache hit.
    """

    positions: torch.Tensor
    delta: int = 0
    spans: tuple[tuple[int, int], ...] = ()

    def positions_at(self, start: int, stop: int) -> torch.Tensor:
        """Positions [P, stop - start] of tokens start..stop-1, prompt or generated."""
        import torch

        total = self.positions.shape[1]
        parts = []
        if start < total:
            parts.append(self.positions[:, start : min(stop, total)])
        if stop > total:
            more = torch.arange(max(start, total), stop) + self.delta
            parts.append(more.expand(self.positions.shape[0], -1))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


@dataclass(frozen=True, slots=True)
class ImageRows:
    """One image, encoded: one row a True flag of its placeholder range.

    Attributes:
        rows: [num_embeds, W], what takes the place of the token embeddings. Owns its storage.
        extra: Further rows by name, e.g. "deepstack" [layers, num_embeds, W]; sliced along their
            second-last dimension exactly as `rows` is.
    """

    rows: torch.Tensor
    extra: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def nbytes(self) -> int:
        """Bytes of storage held."""
        return sum(t.numel() * t.element_size() for t in (self.rows, *self.extra.values()))

    def to(self, device: torch.device | str) -> ImageRows:
        """The same rows there; they are shared if that is where they are."""
        return ImageRows(self.rows.to(device), {name: extra.to(device) for name, extra in self.extra.items()})


@dataclass(frozen=True, slots=True)
class RowPlacement:
    """Rows first..first+len(targets)-1 of one image go to `targets`, indices into the packed batch.

    Attributes:
        image: The encoded image. first: Its first row that this batch needs. targets: int64 [n].
    """

    image: ImageRows
    first: int
    targets: torch.Tensor


@dataclass(frozen=True, slots=True)
class SequenceInput:
    """Whose tokens one sequence of a packed batch are, for models that keep state of their own.

    Attributes:
        request_id: Unique among living requests. prompt: Its whole prompt.
        start: Tokens already computed before this batch; 0 means from the beginning, whatever was before.
    """

    request_id: str
    prompt: ProcessedPrompt
    start: int


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Everything one forward pass reads.

    Attributes:
        token_ids: int64 [T]. At image positions the id is whatever the prompt has; the model must not look it up.
        positions: int64 [P, T].
        placements: Image rows and where they go; together they cover every image position of the batch.
        attention: Metadata for the attention backend, of the layers of cache group 0.
        more_attention: The same for groups 1, 2, ..., which differ in block tables and slots alone; empty: all
            layers use `attention`.
        logit_indices: int64 [M], packed indices whose logits are wanted.
        sequences: One entry a sequence, in packed order; may be empty unless the model `needs_sequences`.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    placements: tuple[RowPlacement, ...]
    attention: AttentionMetadata
    logit_indices: torch.Tensor
    sequences: tuple[SequenceInput, ...] = ()
    more_attention: tuple[AttentionMetadata, ...] = ()

    def attention_of(self, group: int) -> AttentionMetadata:
        """The metadata of a cache group's layers."""
        return self.more_attention[group - 1] if group and self.more_attention else self.attention


class Model(Protocol):
    """A loaded model, ready for packed batches over a paged cache."""

    vocab_size: int
    """Width of the logits, V."""
    forbidden_token_ids: tuple[int, ...]
    """Ids that are never sampled: placeholders of images and other media."""
    max_position: int | None
    """Most tokens a sequence may have, if the model's config says."""

    needs_sequences: bool
    """Whether `forward` reads `PackedBatch.sequences`, and `release` must be called for requests that end."""

    def cache_spec(self) -> CacheSpec:
        """The cache that the engine must provide."""
        ...

    def bind_cache(self, caches: Sequence[LayerCache]) -> None:
        """Take the cache tensors, one per entry of `cache_spec().layers`, before the first forward.

        Layers of different cache groups may be given the same tensors; their block tables never name the same blocks.
        """
        ...

    def unbind_cache(self, caches: Sequence[LayerCache]) -> None:
        """Let go of these cache tensors; if others have been bound since, those stay."""
        ...

    def plan(self, prompt: ProcessedPrompt) -> PromptPlan:
        """Positions and both-way spans of a whole prompt. Raises RequestError if it can not run."""
        ...

    def encode(self, images: Sequence[ImageItem]) -> list[ImageRows | Exception]:
        """Encode each image by itself; an image that fails yields its error and harms no other."""
        ...

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Logits float32 [M, V] of `batch.logit_indices`, after the model's own scale and caps."""
        ...

    def release(self, request_ids: Sequence[str]) -> None:
        """These requests are over or preempted: let go of what is kept of them. Unknown ids are no error."""
        ...

    def describe(self) -> Mapping[str, object]:
        """What was loaded, and which paths were chosen and why; JSON-friendly."""
        ...
