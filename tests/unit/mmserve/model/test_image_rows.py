"""From whatever `get_image_features` gives to one checked row a placeholder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutputWithPooling

from mmserve.errors import InputError, ModelOutputError
from mmserve.model.image_rows import ImageEncoder
from mmserve.model.interface import ImageRows
from processors.types import ImageItem, PlaceholderRange

WIDTH = 4
ROWS = torch.arange(6.0 * WIDTH).view(6, WIDTH)


def output(pooled: Any, **more: Any) -> BaseModelOutputWithPooling:
    made = BaseModelOutputWithPooling(pooler_output=pooled)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def encode(
    give: Callable[[torch.Tensor], Any], *, rows: int = 6, dtype: torch.dtype = torch.float32
) -> ImageRows | Exception:
    def features(pixel_values: torch.Tensor, return_dict: bool | None = None) -> Any:
        return give(pixel_values)

    encoder = ImageEncoder(features, WIDTH, dtype, torch.device("cpu"))
    (result,) = encoder([ImageItem("k", PlaceholderRange(0, rows), {"pixel_values": torch.ones(1)}, (1, 1))])
    return result


@pytest.mark.parametrize(
    "shape",
    [
        ROWS,
        ROWS[None],
        ROWS.view(1, 2, 3, WIDTH),
        [ROWS],
        (ROWS[:2], ROWS[2:]),
        [ROWS[None, :4], ROWS[4:].view(2, 1, WIDTH)],
    ],
    ids=["rows", "batch", "grid", "list", "tuple-of-parts", "mixed"],
)
@pytest.mark.parametrize("wrap", [output, lambda rows: rows, lambda rows: {"pooler_output": rows}])
def test_every_shape(shape: Any, wrap: Callable[[Any], Any]) -> None:
    result = encode(lambda _: wrap(shape))
    assert isinstance(result, ImageRows)
    assert torch.equal(result.rows, ROWS)
    assert result.extra == {}


def test_deepstack_rows_in_every_shape() -> None:
    result = encode(lambda _: output([ROWS], deepstack_features=[ROWS + 1, [ROWS[:1] + 2, ROWS[1:] + 2]]))
    assert isinstance(result, ImageRows)
    assert torch.equal(result.extra["deepstack"], torch.stack([ROWS + 1, ROWS + 2]))


def test_cast_to_the_texts_dtype_in_storage_of_their_own() -> None:
    wide = torch.cat([ROWS, ROWS]).double()
    result = encode(lambda _: output(wide[:6]), dtype=torch.bfloat16)
    assert isinstance(result, ImageRows)
    assert result.rows.dtype == torch.bfloat16
    assert result.rows.untyped_storage().nbytes() == 6 * WIDTH * 2


@pytest.mark.parametrize(
    ("give", "message"),
    [
        (lambda _: output(ROWS[:5]), "made 5 rows for an image whose range takes 6"),
        (lambda _: output([]), "gives no rows at all"),
        (lambda _: output(None), "BaseModelOutputWithPooling with neither pooler_output nor last_hidden_state"),
        (lambda _: output("rows"), "gives str, not rows"),
        (lambda _: None, "gives NoneType with neither"),
        (lambda _: output(ROWS.view(8, 3)), r"shape \(8, 3\) do not end in the text width 4"),
        (lambda _: output(torch.tensor(1.0)), r"shape \(\) do not end in"),
        (lambda _: output(ROWS / 0), "not finite in torch.float16"),
        (lambda _: output(ROWS * 1e5), "not finite in torch.float16"),
        (lambda _: output(ROWS, deepstack_features=[ROWS[:3]]), "made 3 DeepStack rows"),
        (lambda _: {}["key"], "vision tower failed on an image of pixel_values"),
        (lambda _: _.nonsense, "vision tower failed on an image of pixel_values"),
    ],
)
def test_what_is_wrong_is_this_images_failure(give: Callable[[torch.Tensor], Any], message: str) -> None:
    result = encode(give, dtype=torch.float16)
    assert isinstance(result, ModelOutputError)
    with pytest.raises(ModelOutputError, match=message):
        raise result


def test_tensors_that_the_model_does_not_take() -> None:
    encoder = ImageEncoder(lambda pixel_values: None, WIDTH, torch.float32, torch.device("cpu"))
    (result,) = encoder([ImageItem("k", PlaceholderRange(0, 1), {"pixel_valuse": torch.ones(1)}, (1, 1))])
    assert isinstance(result, InputError)


def test_a_tiled_picture_goes_through_tile_by_tile() -> None:
    """Of [1, tiles, ...], one tile of every tensor at a time, so that what is alive beside the pixels is one tile's."""
    seen: list[tuple[int, ...]] = []

    def features(
        pixel_values: torch.Tensor, pixel_attention_mask: torch.Tensor, return_dict: bool | None = None
    ) -> Any:
        seen.append((*pixel_values.shape[:2], *pixel_attention_mask.shape[:2]))
        return output([(pixel_values * pixel_attention_mask[:, :, None]).reshape(-1, WIDTH)])

    pixels = torch.arange(3.0 * 2 * WIDTH).view(1, 3, 2, WIDTH)
    tensors = {"pixel_values": pixels, "pixel_attention_mask": torch.tensor(1).expand(1, 3, WIDTH)}
    item = ImageItem("k", PlaceholderRange(0, 6), tensors, (1, 1))
    (whole,) = ImageEncoder(features, WIDTH, torch.float32, torch.device("cpu"))([item])
    (tiled,) = ImageEncoder(features, WIDTH, torch.float32, torch.device("cpu"), tile_by_tile=True)([item])
    assert isinstance(whole, ImageRows)
    assert isinstance(tiled, ImageRows)
    assert torch.equal(whole.rows, tiled.rows)
    assert seen == [(1, 3, 1, 3), *[(1, 1, 1, 1)] * 3]
