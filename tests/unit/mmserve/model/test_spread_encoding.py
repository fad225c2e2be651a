"""Ranks with a whole tower each encode different images, and all get the same rows, to the bit, or the same error."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fixtures.tiny_models.thread_ranks import on_ranks
from mmserve.errors import InputError, ModelOutputError, RequestError
from mmserve.model.image_rows import ImageEncoder
from mmserve.model.interface import ImageRows
from mmserve.model.spread_encoding import SpreadEncoder, deal_images
from mmserve.parallel.group import Group
from processors.features import ImageFeatures
from processors.types import ImageItem, PlaceholderRange

WIDTH = 6
SIZE = (8, 8)


def image(value: float, rows: int = 3, **more: Any) -> ImageItem:
    pixels = torch.full((1, rows, WIDTH), value)
    where = PlaceholderRange(0, rows, (True,) * rows)
    return ImageItem(f"{value}/{rows}", where, {"pixel_values": pixels, **more}, SIZE)


def rows_of(pixels: torch.Tensor) -> torch.Tensor:
    return torch.sin(pixels[0] * torch.arange(1.0, WIDTH + 1))


SHAPES: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": rows_of,
    "list of tiles": lambda pixels: [rows_of(pixels)[:1], rows_of(pixels)[1:]],
    "output object": lambda pixels: SimpleNamespace(pooler_output=rows_of(pixels), last_hidden_state=None),
    "DeepStack": lambda pixels: SimpleNamespace(
        pooler_output=rows_of(pixels), deepstack_features=[rows_of(pixels) + 1, rows_of(pixels) + 2]
    ),
    "numbered layers": lambda pixels: SimpleNamespace(
        pooler_output=None, deepstack_features=[(3, rows_of(pixels)), (7, rows_of(pixels) * 2)]
    ),
}


def encoder(shape: Callable[[torch.Tensor], Any], dtype: torch.dtype = torch.float32) -> ImageEncoder:
    def features(pixel_values: torch.Tensor, return_dict: bool = True) -> Any:
        if pixel_values[0, 0, 0] == 666:
            raise ValueError("the number of the beast")
        return shape(pixel_values)

    return ImageEncoder(features, WIDTH, dtype, torch.device("cpu"))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, RequestError):
        return type(one) is type(other) and str(one) == str(other)
    pairs = [(one.rows, other.rows), *((one.extra[name], other.extra[name]) for name in one.extra)]
    return list(one.extra) == list(other.extra) and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def test_work_is_dealt_evenly_and_alike_everywhere() -> None:
    assert deal_images([1] * 8, 2) == [0, 1] * 4
    assert deal_images([5, 1, 1, 1, 1, 1], 2) == [0, 1, 1, 1, 1, 1]
    assert deal_images([3, 3, 2, 2, 2], 2) == [0, 1, 0, 1, 0]
    assert deal_images([4], 3) == [0]
    assert deal_images([], 2) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_two_ranks_encode_half_of_the_images_each_and_have_all_rows(shape: str, dtype: torch.dtype) -> None:
    images = [image(i / 3, rows=2 + i % 3) for i in range(8)]
    alone = encoder(SHAPES[shape], dtype)(images)

    def work(group: Group) -> tuple[int, list[Any]]:
        spread = SpreadEncoder(encoder(SHAPES[shape], dtype), group)
        results = spread(images)
        return spread.num_encoded, results

    for count, results in on_ranks(2, work):
        assert count == 4
        assert all(same(result, wanted) for result, wanted in zip(results, alone, strict=True))
        for result in results:
            assert isinstance(result, ImageRows)
            assert all(
                tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
                for tensor in (result.rows, *result.extra.values())
            )


def test_one_image_is_encoded_once() -> None:
    def work(group: Group) -> int:
        spread = SpreadEncoder(encoder(rows_of), group)
        spread([image(1.0)])
        return spread.num_encoded

    assert on_ranks(2, work) == [1, 0]


def test_an_image_that_fails_fails_alone_and_with_the_same_words_on_every_rank() -> None:
    images = [
        image(0.0),
        image(1.0),
        image(float("nan")),
        image(666.0),
        image(2.0, other=torch.ones(1)),
        ImageItem("count", PlaceholderRange(0, 5, (True,) * 5), image(3.0).tensors, SIZE),
        ImageItem("too wide", image(0).range, {}, SIZE, ImageFeatures(torch.ones(3, WIDTH + 1), SIZE)),
        ImageItem("rows", image(0).range, {}, SIZE, ImageFeatures(torch.ones(3, WIDTH), SIZE)),
        image(4.0),
    ]
    alone = encoder(rows_of)(images)
    kinds = [type(result) for result in alone]
    rows, bad = ImageRows, ModelOutputError
    assert kinds == [rows, rows, bad, bad, InputError, bad, InputError, rows, rows]
    for results in on_ranks(3, lambda group: SpreadEncoder(encoder(rows_of), group)(images)):
        assert all(same(result, wanted) for result, wanted in zip(results, alone, strict=True))


def test_a_tower_that_exchanges_stays_on_all_ranks() -> None:
    def work(group: Group) -> tuple[int, list[Any]]:
        own = encoder(lambda pixels: group.all_reduce(rows_of(pixels) / group.size))
        spread = SpreadEncoder(own, group)
        spread([image(8.0)])  # tried on one rank, and seen by both
        before = spread.num_encoded
        results = spread([image(float(i)) for i in range(4)])
        return spread.num_encoded - before, results

    wanted = encoder(rows_of)([image(float(i)) for i in range(4)])
    for count, results in on_ranks(2, work):
        assert count == 4
        assert all(torch.allclose(result.rows, other.rows) for result, other in zip(results, wanted, strict=True))


def test_a_tower_that_exchanges_for_some_images_only_harms_none_and_nobody_waits() -> None:
    def work(group: Group) -> list[Any]:
        def sometimes(pixels: torch.Tensor) -> torch.Tensor:
            rows = rows_of(pixels)
            return group.all_reduce(rows / group.size) if pixels[0, 0, 0] == 2 else rows

        return SpreadEncoder(encoder(sometimes), group)([image(float(i)) for i in range(5)])

    wanted = encoder(rows_of)([image(float(i)) for i in range(5)])
    for results in on_ranks(2, work):
        assert all(torch.allclose(result.rows, other.rows) for result, other in zip(results, wanted, strict=True))
