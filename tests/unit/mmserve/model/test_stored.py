"""Weight files are read into the memory that their tensors stay in, in the dtype that is asked for."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mmserve.errors import WeightsError
from mmserve.model import stored
from mmserve.model.checkpoint import Checkpoint
from mmserve.model.stored import open_tensors

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


def test_a_file_that_shrinks_while_it_is_read(checkpoint: Checkpoint) -> None:
    with ExitStack() as files:
        tensors = open_tensors(checkpoint, files)
        checkpoint.files[0].write_bytes(checkpoint.files[0].read_bytes()[:20])
        with pytest.raises(WeightsError, match="ended inside odd: it was changed while it was read"):
            tensors["odd"].to("cpu", torch.float32)
