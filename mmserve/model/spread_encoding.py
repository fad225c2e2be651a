"""Ranks that share a model's layers and each hold its whole vision tower encode different images of a step.

    rank 0   image 0 ─ image 3 ┐              ┌ rows of 0 1 2 3
    rank 1   image 1 ─ image 2 ┴─ exchange ───┴ rows of 0 1 2 3

Which rank takes which image follows from the step alone, so nobody asks anybody. What goes around is what the encoder
returned, to the bit: an image's rows and extra rows, or its error, which then is its request's on every rank alike.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

import torch

import mmserve.errors
from mmserve.errors import ModelOutputError, RequestError
from mmserve.model.image_rows import ImageEncoder
from mmserve.model.interface import ImageRows
from mmserve.parallel.group import ExchangeError, Group
from processors.features import ImageFeatures
from processors.types import ImageItem

__all__ = ["SpreadEncoder", "deal_images"]

_Result = ImageRows | RequestError


class SpreadEncoder:
    """An `ImageEncoder` over the ranks of a group; all of them are called with the same images, and return the same.

    Whether the tower is whole on each rank shows when it runs: one that wants to exchange something in the middle (it
    follows a plan, or looks up the embedding that ranks share) is refused, all ranks hear of it, and from then on they
    encode every image together.

    Args:
        encoder: This rank's own.
        group: The ranks that share the model's layers.

    Attributes:
        num_encoded: Pictures that went through this rank's tower.
    """

    def __init__(self, encoder: ImageEncoder, group: Group) -> None:
        self.num_encoded = 0
        self._encoder = encoder
        self._group = group
        self._is_whole = True

    def check_given(self, given: ImageFeatures) -> None:
        """As `ImageEncoder.check_given`."""
        self._encoder.check_given(given)

    def __call__(self, images: Sequence[ImageItem]) -> list[ImageRows | Exception]:
        """One result an image: its rows, or the RequestError that is this image's alone.

        Raises:
            ExchangeError: Another rank is gone.
        """
        # Rows that were given are here already, on every rank.
        results = {index: self._own(image) for index, image in enumerate(images) if image.features is not None}
        pictures = {index: image for index, image in enumerate(images) if image.features is None}
        if self._is_whole and pictures:
            results |= self._spread(pictures)
        if not self._is_whole:
            results |= {index: self._own(image) for index, image in pictures.items()}
        return [results[index] for index in range(len(images))]

    def _spread(self, images: Mapping[int, ImageItem]) -> dict[int, _Result]:
        """Each image on one rank; nothing, if a rank found that its tower is not whole."""
        owners = deal_images([_work(image) for image in images.values()], self._group.size)
        mine = [index for index, owner in zip(images, owners, strict=True) if owner == self._group.rank]
        with self._group.refuse("ranks encode different images") as refused:
            own = {index: self._own(images[index]) for index in mine}
        found = self._exchange(own, refused.count)
        if found is None:
            self._is_whole = False
        return found or {}

    def _own(self, image: ImageItem) -> _Result:
        """Encoded here; whatever goes wrong is an answer, for other ranks wait for one."""
        self.num_encoded += image.features is None
        error: Exception
        try:
            result = self._encoder([image])[0]
            if isinstance(result, (ImageRows, RequestError)):
                return result
            error = result
        except ExchangeError:
            raise
        except Exception as caught:  # noqa: BLE001 - the border of a request's blast radius
            error = caught
        return ModelOutputError(f"the image could not be encoded: {type(error).__name__}: {str(error)[:200]}")

    def _exchange(self, own: Mapping[int, _Result], refused: int) -> dict[int, _Result] | None:
        """All ranks' results; None if one of them was refused an exchange."""
        head, body = _packed(own)
        group, device = self._group, self._encoder.device
        sizes = torch.tensor([refused, len(head), len(body)], dtype=torch.int64, device=device)
        gathered = torch.stack(group.all_gather(sizes)).tolist()
        if any(refusals for refusals, _, _ in gathered):
            return None
        found = dict(own)
        for rank, (_, of_head, of_body) in enumerate(gathered):
            if not of_head:
                continue
            if rank == group.rank:
                message = torch.cat([torch.frombuffer(bytearray(head), dtype=torch.uint8).to(device), body.to(device)])
                group.broadcast(message, rank)
                continue
            message = group.broadcast(torch.empty(of_head + of_body, dtype=torch.uint8, device=device), rank)
            entries = json.loads(bytes(message[:of_head].tolist()))
            found |= _unpacked(entries, message[of_head:], self._encoder.dtype)
        return found


def deal_images(work: Sequence[int], ranks: int) -> list[int]:
    """The rank of each image: the largest first, each to the rank with least to do so far, ties to the lower one."""
    loads = [0] * ranks
    owners = [0] * len(work)
    for index in sorted(range(len(work)), key=lambda index: (-work[index], index)):
        owner = min(range(ranks), key=loads.__getitem__)
        owners[index] = owner
        loads[owner] += work[index]
    return owners


def _work(image: ImageItem) -> int:
    """What an image costs, in values that the tower reads: its pixels, tile by tile; at least 1."""
    return max(1, sum(tensor.numel() for tensor in image.tensors.values() if tensor.is_floating_point()))


def _packed(results: Mapping[int, _Result]) -> tuple[bytes, torch.Tensor]:
    """What there is, as JSON (an entry an image), and the values of all tensors [bytes], uint8, in that order.

    Both are empty if there is nothing.
    """
    entries: list[object] = []
    values = [torch.empty(0, dtype=torch.uint8)]
    for index, result in results.items():
        if isinstance(result, RequestError):
            entries.append([index, type(result).__name__, str(result)])
            continue
        tensors = {"": result.rows, **result.extra}
        entries.append([index, None, {name: list(tensor.shape) for name, tensor in tensors.items()}])
        flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors.values()]
        values = [*(part.to(flat[0].device) for part in values), *flat]
    return (json.dumps(entries).encode() if entries else b""), torch.cat(values)


def _unpacked(
    entries: Sequence[tuple[int, str | None, object]], values: torch.Tensor, dtype: torch.dtype
) -> dict[int, _Result]:
    results: dict[int, _Result] = {}
    start = 0
    for index, error, about in entries:
        if error is not None:
            results[index] = _error(error, str(about))
            continue
        assert isinstance(about, dict)
        tensors = {}
        for name, shape in about.items():
            stop = start + math.prod(shape) * dtype.itemsize
            # A copy, in storage of its own: a view would keep the whole message alive, and may not be aligned.
            tensors[name] = values[start:stop].clone().view(dtype).reshape(shape)
            start = stop
        results[index] = ImageRows(tensors.pop(""), tensors)
    return results


def _error(name: str, message: str) -> RequestError:
    """The error of another rank, of its own class."""
    kind = getattr(mmserve.errors, name, ModelOutputError)
    known = isinstance(kind, type) and issubclass(kind, RequestError)
    return kind(message) if known else ModelOutputError(message)
