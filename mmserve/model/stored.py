"""Tensors of weight files that are read when they are asked for, straight into the memory they stay in.

A safetensors file is a header of names, dtypes, shapes and byte ranges, and then the bytes. They are read and
not mapped, because mapped pages count to the process beside what is made from them; and by ourselves, because
the library's `pread` slices read a whole tensor for each slice. Nothing is held but the tensor that is being
made, and a buffer of 16 MiB where its dtype or device differs from the file's.

Format: https://huggingface.co/docs/safetensors, "Format".
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

import torch

from mmserve.errors import WeightsError
from mmserve.model.checkpoint import Checkpoint, load_pickled

__all__ = ["LazyTensor", "PickledTensor", "StoredTensor", "open_tensors"]

_CHUNK: Final = 16 * 2**20
_DTYPES: Final[dict[str, torch.dtype]] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


class LazyTensor(Protocol):
    """As much of a tensor as transformers' conversions ask for: all of it, then in a dtype and on a device."""

    def __getitem__(self, index: object) -> LazyTensor:
        """Itself: `tensor[...]` is how all of it is asked for."""
        ...

    def to(self, device: Any, dtype: torch.dtype) -> torch.Tensor:
        """The tensor, in memory of its own."""
        ...

    @property
    def size(self) -> tuple[int, ...]:
        """Its shape."""
        ...

    def part(self, device: Any, dtype: torch.dtype, dim: int, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Half-open ranges of its dimension `dim` (-1 is the last), joined, in memory of their own."""
        ...


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a safetensors file.

    Attributes:
        file: Open for reading, unbuffered. name: What it is called there. dtype, shape: As stored.
        offset: Where its bytes begin in the file. buffer: uint8, shared by all tensors of one loading.
    """

    file: BinaryIO
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    buffer: torch.Tensor

    def __getitem__(self, index: object) -> StoredTensor:
        """Itself: nothing is read yet."""
        return self

    def to(self, device: Any, dtype: torch.dtype) -> torch.Tensor:
        """Read it. Raises WeightsError if the file ends before it does."""
        made = torch.empty(self.shape, dtype=dtype, device=device)
        self._read(made, [(0, made.numel())])
        return made

    @property
    def size(self) -> tuple[int, ...]:
        """Its shape."""
        return self.shape

    def part(self, device: Any, dtype: torch.dtype, dim: int, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Read ranges of one dimension, and nothing between them. Raises WeightsError as `to`."""
        axis = len(self.shape) + dim
        outer, width, inner = math.prod(self.shape[:axis]), self.shape[axis], math.prod(self.shape[axis + 1 :])
        shape = list(self.shape)
        shape[axis] = sum(stop - start for start, stop in ranges)
        made = torch.empty(shape, dtype=dtype, device=device)
        runs = ((row * width + start, stop - start) for row in range(outer) for start, stop in ranges)
        self._read(made, ((first * inner, count * inner) for first, count in runs))
        return made

    def _read(self, made: torch.Tensor, runs: Iterable[tuple[int, int]]) -> None:
        """Fill a dense tensor with runs of elements, (first, count), one after the other."""
        flat, size = made.view(-1), self.dtype.itemsize
        if made.dtype == self.dtype and made.device.type == "cpu":
            left = memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
            for first, count in runs:
                self._fill(first, left[: count * size])
                left = left[count * size :]
            return
        staged, most = memoryview(self.buffer.numpy()), self.buffer.numel() // size  # type: ignore[arg-type]
        done = held = 0
        for first, count in _pieces(runs, most):
            if held + count > most:
                flat[done : done + held].copy_(self.buffer[: held * size].view(self.dtype))
                done, held = done + held, 0
            self._fill(first, staged[held * size : (held + count) * size])
            held += count
        flat[done:].copy_(self.buffer[: held * size].view(self.dtype))

    def _fill(self, first: int, left: memoryview) -> None:
        """The bytes from element `first` on into `left`; a read may give fewer than it was asked for."""
        self.file.seek(self.offset + first * self.dtype.itemsize)
        while left:
            count = self.file.readinto(left[: 2**30])  # type: ignore[attr-defined]
            if not count:
                raise WeightsError(f"{self.file.name} ended inside {self.name}: it was changed while it was read")
            left = left[count:]


def _pieces(runs: Iterable[tuple[int, int]], most: int) -> Iterator[tuple[int, int]]:
    """The same runs, cut where they are longer than `most`."""
    for first, count in runs:
        for start in range(0, count, most):
            yield first + start, min(most, count - start)


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """A tensor of a pickled file, mapped until it is copied."""

    tensor: torch.Tensor

    def __getitem__(self, index: object) -> PickledTensor:
        """Itself: nothing is read yet."""
        return self

    def to(self, device: Any, dtype: torch.dtype) -> torch.Tensor:
        """A copy: the model must not depend on the file, nor on another tensor that shares its storage."""
        return torch.empty(self.tensor.shape, dtype=dtype, device=device).copy_(self.tensor)

    @property
    def size(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.tensor.shape)

    def part(self, device: Any, dtype: torch.dtype, dim: int, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
        """A copy of ranges of one dimension."""
        pieces = [self.tensor.narrow(dim, start, stop - start) for start, stop in ranges]
        return torch.cat([piece.to(device=device, dtype=dtype) for piece in pieces], dim=dim)


def open_tensors(checkpoint: Checkpoint, files: ExitStack) -> Mapping[str, LazyTensor]:
    """Every tensor of the checkpoint by its name; its files stay open as long as `files`.

    Raises:
        WeightsError: A tensor is of a dtype that torch does not have.
    """
    if checkpoint.pickled:
        return {n: PickledTensor(t) for path in checkpoint.files for n, t in load_pickled(path).items()}
    buffer = torch.empty(_CHUNK, dtype=torch.uint8)
    tensors: dict[str, LazyTensor] = {}
    for path in checkpoint.files:
        tensors.update(_stored(path, files.enter_context(path.open("rb", buffering=0)), buffer))
    return tensors


def _stored(path: Path, file: Any, buffer: torch.Tensor) -> Mapping[str, StoredTensor]:
    """The header of one file, which `open_checkpoint` has checked."""
    size = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            raise WeightsError(f"{name} in {path} is stored as {entry['dtype']}; known: {', '.join(_DTYPES)}")
        start, stop = entry["data_offsets"]
        if stop - start != math.prod(entry["shape"]) * dtype.itemsize:
            raise WeightsError(f"{name} in {path} is {stop - start} bytes long, which {entry['shape']} is not")
        tensors[name] = StoredTensor(file, name, dtype, tuple(entry["shape"]), 8 + size + start, buffer)
    return tensors
