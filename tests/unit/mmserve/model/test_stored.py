"""Weight files are read into the memory that their tensors stay in, in the dtype that is asked for."""

from __future__ import annotations

import io
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mmserve.errors import WeightsError
from mmserve.model import stored
from mmserve.model.checkpoint import Checkpoint
from mmserve.model.stored import PickledTensor, StoredTensor, open_tensors

TENSORS = {
    "odd": torch.arange(21, dtype=torch.float32).view(3, 7) / 3,
    "half": torch.arange(12.0).view(2, 3, 2).bfloat16(),
    "flags": torch.tensor([True, False, True]),
    "number": torch.tensor(7),
    "none": torch.zeros(0, 4),
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    save_file(TENSORS, tmp_path / "model.safetensors", {"format": "pt"})
    return Checkpoint(tmp_path, {}, "llama", (tmp_path / "model.safetensors",), {})


@pytest.mark.parametrize("chunk", [8, 20, 2**20])
def test_values_in_any_dtype(checkpoint: Checkpoint, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "_CHUNK", chunk)
    with ExitStack() as files:
        tensors = open_tensors(checkpoint, files)
        assert tensors.keys() == TENSORS.keys()
        for name, expected in TENSORS.items():
            for dtype in (expected.dtype, torch.float32, torch.bfloat16, torch.float64):
                read = tensors[name][...].to("cpu", dtype)
                assert torch.equal(read, expected.to(dtype))
                assert read.is_contiguous()


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("chunk", [8, 20, 2**20])
@pytest.mark.parametrize(("name", "dim"), [("odd", -1), ("odd", -2), ("half", -1), ("half", -2), ("half", -3)])
def test_parts_in_any_dtype(
    checkpoint: Checkpoint, name: str, dim: int, chunk: int, pickled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "_CHUNK", chunk)
    expected = TENSORS[name]
    last = expected.shape[dim]
    with ExitStack() as files:
        tensor = PickledTensor(expected) if pickled else open_tensors(checkpoint, files)[name]
        assert tensor.size == expected.shape
        for ranges in ([(0, last)], [(1, 2)], [(0, 1), (last - 1, last)]):
            wanted = torch.cat([expected.narrow(dim, start, stop - start) for start, stop in ranges], dim)
            for dtype in (expected.dtype, torch.float64):
                part = tensor.part("cpu", dtype, dim, ranges)
                assert torch.equal(part, wanted.to(dtype))
                assert part.is_contiguous()


def test_of_a_part_nothing_more_is_read() -> None:
    class Counted(io.BytesIO):
        count = 0

        def readinto(self, into: Any) -> int:
            read = super().readinto(into)
            self.count += read
            return read

    whole = torch.arange(24.0).view(4, 6)
    file = Counted(b"head" + whole.numpy().tobytes())
    tensor = StoredTensor(file, "whole", torch.float32, (4, 6), 4, torch.empty(16, dtype=torch.uint8))
    assert torch.equal(tensor.part("cpu", torch.float32, -1, [(1, 3)]), whole[:, 1:3])
    assert file.count == 4 * 2 * 4
    assert torch.equal(tensor.part("cpu", torch.bfloat16, -2, [(3, 4)]), whole[3:].bfloat16())
    assert file.count == 4 * 2 * 4 + 6 * 4


def test_a_file_that_shrinks_while_it_is_read(checkpoint: Checkpoint) -> None:
    with ExitStack() as files:
        tensors = open_tensors(checkpoint, files)
        checkpoint.files[0].write_bytes(checkpoint.files[0].read_bytes()[:20])
        with pytest.raises(WeightsError, match="ended inside odd: it was changed while it was read"):
            tensors["odd"].to("cpu", torch.float32)
