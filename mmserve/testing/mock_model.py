"""A model without weights whose every logit depends on all that came before, through the paged cache.

Two layers of modular arithmetic stand for attention. A token's feature mixes its id (or image row) and position;
layer 0 keeps features, layer 1 keeps what each token has seen of them (both ways inside a span). The logits
are a function of all that layer 1 holds, in order. All numbers are whole and exact in float64, so

* equal histories give equal logits to the last bit, whatever shares the batch, and
* one wrong slot, block, position, image row or stale cache entry gives other tokens.

Scripted answers need a memory too: layer 2 keeps how much of the script each token completes.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

import torch

from mmserve.attention.interface import AttentionMetadata, LayerCache
from mmserve.errors import RequestError
from mmserve.model.interface import CacheSpec, ImageRows, LayerCacheSpec, PackedBatch, PromptPlan
from processors.types import ImageItem, PlaceholderRange, ProcessedPrompt

__all__ = ["MockModel", "mock_image", "mock_prompt"]

PRIME = 1048573
"""Below 2**20: a product of two residues stays exact, and so does a sum of thousands of residues."""


def mock_image(offset: int, length: int, seed: int = 0, *, key: str | None = None, gaps: int = 0) -> ImageItem:
    """An image of `length` placeholder tokens at `offset`, whose content is `seed`.

    Args:
        offset, length: Its range.
        seed: Equal seeds (and lengths) are equal images.
        key: Content key; None: one that holds seed, length and gaps.
        gaps: If not 0, every gaps-th token of the range takes no row (as row-end tokens do).
    """
    flags = tuple((i + 1) % gaps != 0 for i in range(length)) if gaps else None
    return ImageItem(
        key=f"image-{seed}-{length}-{gaps}" if key is None else key,
        range=PlaceholderRange(offset, length, flags),
        tensors={"pixel_values": torch.full((1, 1), seed, dtype=torch.int64)},
        size=(length, 1),
    )


def mock_prompt(token_ids: Sequence[int], images: Sequence[ImageItem] = ()) -> ProcessedPrompt:
    """A prompt of these ids; the images' ranges are filled with the id 258, whatever stood there."""
    ids = list(token_ids)
    for image in images:
        ids[image.range.offset : image.range.end] = [258] * image.range.length
    return ProcessedPrompt(tuple(ids), tuple(images))


class MockModel:
    """Fills the seam `mmserve.model.interface.Model`.

    Args:
        vocab_size: Width of the logits.
        script: Ids that an answer begins with; after them the arithmetic goes on. A prompt that ends with the
            script's first ids is answered with the rest.
        both_ways: Images attend both ways inside, as Gemma 3's do.
        max_position: Most tokens of a sequence.
        eos_token_id: Never likely unless scripted, so that answers are long.
        forbidden_token_ids: Never sampled.
        broken_images: Keys whose encoding fails.
        short_images: Keys that give one row too few.
        nan_after: Ids whose keys, values and logits are NaN.
        dies_on: Ids that make the whole forward raise.
        forward_seconds: Time to sleep in each forward.
        windows: Keys that a token sees in layers 0 and 1, itself included; None: all of them.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 259,
        script: Sequence[int] = (),
        both_ways: bool = False,
        max_position: int | None = None,
        eos_token_id: int = 257,
        forbidden_token_ids: Sequence[int] = (258,),
        broken_images: Collection[str] = (),
        short_images: Collection[str] = (),
        nan_after: Collection[int] = (),
        dies_on: Collection[int] = (),
        forward_seconds: float = 0.0,
        windows: tuple[int | None, int | None] = (None, None),
    ) -> None:
        self.needs_sequences = False
        self.vocab_size = vocab_size
        self.forbidden_token_ids = tuple(forbidden_token_ids)
        self.max_position = max_position
        self.encoded: list[str] = []
        self.num_forwards = 0
        self._script = tuple(script)
        self._both_ways = both_ways
        self._eos_token_id = eos_token_id
        self._broken_images = frozenset(broken_images)
        self._short_images = frozenset(short_images)
        self._nan_after = frozenset(nan_after)
        self._dies_on = frozenset(dies_on)
        self._forward_seconds = forward_seconds
        self._windows = windows
        self._caches: Sequence[LayerCache] = ()

    def cache_spec(self) -> CacheSpec:
        """Layers of one number a token, float64."""
        windows = (*self._windows, self._windows[1])[: 3 if self._script else 2]
        return CacheSpec(tuple(LayerCacheSpec(1, 1, 1, window) for window in windows), torch.float64)

    def bind_cache(self, caches: Sequence[LayerCache]) -> None:
        """Take the cache."""
        self._caches = caches

    def unbind_cache(self, caches: Sequence[LayerCache]) -> None:
        """Let go of the cache, if it is this one."""
        if [id(cache) for cache in self._caches] == [id(cache) for cache in caches]:
            self._caches = ()

    def plan(self, prompt: ProcessedPrompt) -> PromptPlan:
        """An image takes one position, as if it were one token; so `delta` is not 0 and a wrong one shows."""
        steps = torch.ones(len(prompt.token_ids), dtype=torch.int64)
        for image in prompt.images:
            steps[image.range.offset + 1 : image.range.end] = 0
        positions = steps.cumsum(0) - 1
        spans = tuple((i.range.offset, i.range.end) for i in prompt.images) if self._both_ways else ()
        return PromptPlan(positions[None], int(steps.sum()) - len(steps), spans)

    def encode(self, images: Sequence[ImageItem]) -> list[ImageRows | Exception]:
        """Rows that depend on the image's content and their place in it."""
        return [self._encode_one(image) for image in images]

    def _encode_one(self, image: ImageItem) -> ImageRows | Exception:
        self.encoded.append(image.key)
        if image.key in self._broken_images:
            return RequestError(f"image {image.key} is broken")
        count = image.range.num_embeds - (image.key in self._short_images)
        seed = zlib.crc32(image.tensors["pixel_values"].numpy().tobytes()) % PRIME
        rows = (torch.arange(count, dtype=torch.float64) * 7919 + seed) % PRIME
        return ImageRows(rows[:, None], {"deep": (rows[None, :, None] * 31 + 7) % PRIME})

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Logits float32 [M, V]."""
        self.num_forwards += 1
        if self._forward_seconds:
            time.sleep(self._forward_seconds)
        if self._dies_on and not self._dies_on.isdisjoint(batch.token_ids.tolist()):
            raise RuntimeError("the mock model was told to die")
        meta = batch.attention
        features = _features(batch)
        for token_id in self._nan_after:
            features[batch.token_ids == token_id] = torch.nan
        _write(self._caches[0], self._meta(0, batch).slot_mapping, features)
        seen = torch.empty_like(features)
        starts = meta.cu_seqlens_q.tolist()
        for s, (begin, end) in enumerate(pairwise(starts)):
            own = torch.arange(meta.key_lens[s] - (end - begin), meta.key_lens[s])
            last = own.clone()
            for first, stop in meta.spans[s]:
                last[(own >= first) & (own < stop)] = stop - 1
            seen[begin:end] = (self._sums(0, batch, s, own, last) * 31 + features[begin:end] * 17 + 3) % PRIME
        _write(self._caches[1], self._meta(1, batch).slot_mapping, seen)
        if self._script:
            self._follow_script(batch)
        wanted = batch.logit_indices.tolist()
        rows = []
        for s, (begin, end) in enumerate(pairwise(starts)):
            # Key number minus packed index is the same for all tokens of a chunk.
            shift = meta.key_lens[s] - end
            if keys := [index + shift for index in wanted if begin <= index < end]:
                rows += self._logits(batch, s, keys)
        return torch.stack(rows) if rows else torch.empty(0, self.vocab_size)

    def release(self, request_ids: Sequence[str]) -> None:
        """Nothing is kept of a request outside the cache."""

    def describe(self) -> Mapping[str, object]:
        """Says that it is a mock."""
        return {"model": "MockModel", "vocab_size": self.vocab_size}

    def _meta(self, layer: int, batch: PackedBatch) -> AttentionMetadata:
        return batch.attention_of(self.cache_spec().layout().places[layer][0])

    def _sums(self, layer: int, batch: PackedBatch, s: int, queries: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Weighted sums modulo PRIME of what the cache holds of sequence `s`: for each of the tokens `queries`, of the
        keys from where its window begins to `last`."""
        keys = self._held(layer, batch, s)
        weights = torch.arange(1, len(keys) + 1, dtype=torch.float64)
        terms = (keys * weights) % PRIME + self._held(layer, batch, s, values=True)
        before = torch.cat([terms.new_zeros(1), terms.cumsum(0)])
        window = self._windows[layer]
        first = torch.zeros_like(queries) if window is None else (queries - window + 1).clamp(min=0)
        return (before[last + 1] - before[first]) % PRIME

    def _held(self, layer: int, batch: PackedBatch, s: int, *, values: bool = False) -> torch.Tensor:
        """What the cache holds for sequence `s`, one number a token [L]."""
        cache, length = self._caches[layer], batch.attention.key_lens[s]
        blocks = self._meta(layer, batch).block_tables[s, : -(-length // cache.block_size)].long()
        held = (cache.value if values else cache.key)[blocks].flatten()
        # As attention does, read the rest of the last block and give it no weight: NaN left there would still show.
        return held[:length] + held[length:].sum() * 0.0

    def _logits(self, batch: PackedBatch, s: int, keys: Sequence[int]) -> list[torch.Tensor]:
        """Logits [V] after each of the tokens `keys` of sequence `s`."""
        wanted = torch.tensor(keys)
        states = self._sums(1, batch, s, wanted, wanted)
        done = self._held(2, batch, s) if self._script else None
        ids = torch.arange(self.vocab_size, dtype=torch.float64)
        rows = []
        for key, state in zip(keys, states, strict=True):
            logits = ((ids * 48271 + state) * 16807 % PRIME / PRIME * 8).float()
            logits[self._eos_token_id] = -20.0
            logits += state * 0.0
            if done is not None and done[key] < len(self._script):
                logits[self._script[int(done[key])]] = 30.0
            rows.append(logits)
        return rows

    def _follow_script(self, batch: PackedBatch) -> None:
        """Layer 2: the number of script ids that end at each token; once it is complete it stays so."""
        starts, slots = batch.attention.cu_seqlens_q.tolist(), self._meta(2, batch).slot_mapping
        for s, (begin, end) in enumerate(pairwise(starts)):
            before = self._held(2, batch, s)[: batch.attention.key_lens[s] - (end - begin)]
            done = int(before[-1]) if len(before) else 0
            for index in range(begin, end):
                if done < len(self._script):
                    token_id = int(batch.token_ids[index])
                    done = done + 1 if token_id == self._script[done] else int(token_id == self._script[0])
                self._caches[2].key.view(-1)[slots[index]] = done


def _features(batch: PackedBatch) -> torch.Tensor:
    """One whole number a token, float64 [T], from its id or its image row, and its position."""
    inputs = batch.token_ids.double() * 2654435 % PRIME
    for placement in batch.placements:
        first, count = placement.first, len(placement.targets)
        rows = placement.image.rows[first : first + count, 0]
        deep = placement.image.extra["deep"][0, first : first + count, 0]
        inputs[placement.targets] = (rows * 3 + deep) % PRIME
    return (inputs * 5 + (batch.positions[0] % PRIME).double() * 11) % PRIME


def _write(cache: LayerCache, slots: torch.Tensor, numbers: torch.Tensor) -> None:
    """Both keys and values, different from each other."""
    cache.key.view(-1)[slots] = numbers
    cache.value.view(-1)[slots] = (numbers * 13 + 1) % PRIME
