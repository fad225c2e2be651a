"""Each rank reads its own part of the weight files and nothing else, so it holds no more than that and one tensor."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fixtures.tiny_models.families import FAMILIES
from fixtures.tiny_models.family import build
from mmserve.model.build import build_model
from mmserve.model.checkpoint import open_checkpoint
from mmserve.model.model_config import read_config
from mmserve.model.precision import resolve_precision
from mmserve.model.stored import StoredTensor
from mmserve.parallel.group import Group
from mmserve.parallel.layout import Layout
from mmserve.parallel.rank import RankShape
from mmserve.parallel.shards import before_transposition
from mmserve.parallel.shares import share_width

CPU = torch.device("cpu")


class Meter:
    """Counts what is read from weight files, in bytes and by tensor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: dict[str, int] = {}
        fill = StoredTensor._fill

        def counted(tensor: StoredTensor, first: int, left: memoryview) -> None:
            self.read[tensor.name] = self.read.get(tensor.name, 0) + len(left)
            fill(tensor, first, left)

        monkeypatch.setattr(StoredTensor, "_fill", counted)

    def load(self, folder: Path, layout: Layout | None = None, rank: int = 0) -> tuple[int, int]:
        """Bytes read and bytes of parameters, of one rank or of the whole model."""
        self.read.clear()
        checkpoint = open_checkpoint(folder)
        config = read_config(checkpoint, False)
        precision = resolve_precision("float32", checkpoint.tensors, config, CPU)
        shape = None
        if layout is not None:
            place = layout.place(rank)
            tensor = Group(None, place.tensor_rank, layout.tensor)
            shape = RankShape(place, tensor, Group(None, place.stage, layout.pipeline))
        model: Any = build_model(checkpoint, config, precision, CPU, rank=shape).model
        return sum(self.read.values()), sum(p.numel() * p.element_size() for p in model.parameters())


@pytest.mark.parametrize("layout", [Layout(2, 1), Layout(1, 2), Layout(2, 2)], ids=["2x1", "1x2", "2x2"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen2_vl", "qwen3_vl_moe"])
def test_a_rank_reads_the_bytes_that_it_keeps(
    name: str, layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dense, tied, with a tower, and experts that are transposed on the way.

    What is read in all is what is kept, each byte once: so no more than the share is held at any time, and one tensor
    beside it while it is made of what was read.
    """
    folder = build(FAMILIES[name], tmp_path)
    meter = Meter(monkeypatch)
    whole, _ = meter.load(folder)
    for rank in range(layout.size):
        read, kept = meter.load(folder, layout, rank)
        assert read == kept
        assert read < whole


def test_a_rank_s_row_of_a_tensor_is_read_and_not_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build(FAMILIES["llama"], tmp_path)
    meter = Meter(monkeypatch)
    meter.load(folder)
    whole = dict(meter.read)
    halves = [(meter.load(folder, Layout(2, 1), rank), dict(meter.read))[1] for rank in range(2)]
    cut = {name for name in whole if "norm" not in name}
    assert cut
    for name in cut:
        assert halves[0][name] + halves[1][name] == whole[name], name
        assert max(halves[0][name], halves[1][name]) < whole[name], name


def test_a_share_of_a_tensor_that_is_transposed() -> None:
    """[experts, in, out] in the file, [experts, out, in] in the model."""
    share = share_width(-2, 8, 1, 2)
    always, looks = (SimpleNamespace(dim0=1, dim1=2, check_dims=check) for check in (False, True))
    for step in (always, looks):
        read = before_transposition(step, (3, 6, 8), (3, 8, 6), share)
        assert read is not None
        assert (read.dim, read.ranges) == (-1, share.ranges)
    assert before_transposition(looks, (3, 8, 6), (3, 8, 6), share) == share  # it is stored as it is wanted
    assert before_transposition(looks, (3, 4, 8), (3, 8, 4), share) is None  # a cut of [3, 4, 4] looks right as it is
    assert before_transposition(always, (3, 4, 8), (3, 8, 4), share) is not None
    assert before_transposition(always, (3, 5, 8), (3, 8, 6), share) is None
