"""An image given as the rows that a model made of it: the same ids as the picture's, and every wrong row refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy
import pytest
import torch
from pictures import noise

from processors import ImageFeatures, MediaError, MediaOptions, PromptProcessor

Maker = Callable[[str], PromptProcessor]

SIZES = [(64, 48), (300, 120), (30, 200)]
FAMILIES = [
    "aya_vision", "gemma3", "idefics2", "idefics3", "internvl", "lfm2_vl", "llava", "llava_next", "llava_onevision",
    "minicpmv4_6", "mistral3", "molmo2", "qwen2_vl", "qwen3_vl", "smolvlm", "video_llama_3",
]  # fmt: skip


def _rows(count: int, size: tuple[int, int], width: int = 8, seed: int = 0) -> ImageFeatures:
    return ImageFeatures(torch.randn(count, width, generator=torch.Generator().manual_seed(seed)), size)


def _of(processor: PromptProcessor, pictures: list[Any]) -> list[ImageFeatures]:
    images = processor.process("x", pictures).images
    return [_rows(image.range.num_embeds, image.size, seed=seed) for seed, image in enumerate(images)]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_ids_and_ranges_as_the_pictures(processor_of: Maker, family: str) -> None:
    processor = processor_of(family)
    pictures = [noise(*size, seed) for seed, size in enumerate(SIZES)]
    features = _of(processor, pictures)
    for given in ([features[0], features[1], features[2]], [pictures[0], features[1], pictures[2]]):
        ours, expected = processor.process("What?", given), processor.process("What?", pictures)
        assert ours.token_ids == expected.token_ids
        assert ours.mm_token_type_ids == expected.mm_token_type_ids
        assert [i.range for i in ours.images] == [i.range for i in expected.images]
        for mine, theirs, source in zip(ours.images, expected.images, given, strict=True):
            if isinstance(source, ImageFeatures):
                assert mine.features is not None
                assert torch.equal(mine.features.rows, source.rows)
                assert not any("pixel" in name for name in mine.tensors)
                assert mine.key != theirs.key
            for name, tensor in mine.tensors.items():
                assert torch.equal(tensor, theirs.tensors[name])


def test_features_stand_in_messages_and_expanded_ids(processor_of: Maker) -> None:
    processor = processor_of("qwen2_vl")
    picture = noise(64, 48)
    features = _of(processor, [picture])[0]
    content = [{"type": "text", "text": "Look: "}, {"type": "image", "image": features}]
    ours = processor.process([{"role": "user", "content": content}])
    assert ours.images[0].features is not None
    again = processor.process(list(ours.token_ids), [features])
    assert again.images == replace_features(ours.images, again.images)


def replace_features(images: Any, others: Any) -> tuple[Any, ...]:
    """The images with the feature objects of others: features are compared by key."""
    return tuple(replace(one, features=other.features) for one, other in zip(images, others, strict=True))


def test_the_key_is_of_values_shape_size_and_options(processor_of: Maker) -> None:
    processor = processor_of("llava")
    count = processor.process("x", [noise(64, 48)]).images[0].range.num_embeds
    given = _rows(count, (64, 48))
    variants = [
        given,
        _rows(count, (48, 64)),
        _rows(count, (64, 48), seed=1),
        _rows(count, (64, 48), width=16),
        ImageFeatures(given.rows.half(), (64, 48)),
        ImageFeatures(given.rows, (64, 48), given.rows[None]),
    ]
    keys = [processor.process("x", [one]).images[0].key for one in variants]
    keys.append(processor.process("x", [given], options={"do_rescale": False}).images[0].key)
    keys += [processor.process("x", [one], image_ids=["a"]).images[0].key for one in (given, noise(64, 48))]
    assert len(set(keys)) == len(keys)
    assert processor.process("y", [ImageFeatures(given.rows.clone(), (64, 48))]).images[0].key == keys[0]


def test_the_caller_may_write_to_the_rows_afterwards(processor_of: Maker) -> None:
    processor = processor_of("llava")
    given = _of(processor, [noise(64, 48)])[0]
    image = processor.process("x", [given]).images[0]
    before = given.rows.clone()
    given.rows.zero_()
    assert image.features is not None
    assert torch.equal(image.features.rows, before)


def test_numpy_arrays_are_rows_too(processor_of: Maker) -> None:
    processor = processor_of("llava")
    given = _of(processor, [noise(64, 48)])[0]
    as_array = ImageFeatures(given.rows.numpy(), given.size)  # type: ignore[arg-type]
    assert processor.process("x", [as_array]).images[0].key == processor.process("x", [given]).images[0].key


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (torch.randn(17, 8), "17 rows, but a picture of 64x48 takes 16"),
        (torch.randn(1, 8), "1 rows, but a picture of 64x48 takes 16"),
        (torch.randn(16), r"\[16\], not \[n, W\]"),
        (torch.randn(1, 16, 8), r"\[1, 16, 8\], not \[n, W\]"),
        (torch.randn(0, 8), r"\[0, 8\], not"),
        (torch.randint(5, (16, 8)), "torch.int64: give float32"),
        (torch.randn(16, 8, dtype=torch.float64), "torch.float64: give float32"),
        (torch.randn(16, 8, dtype=torch.complex64), "complex64"),
        (torch.randn(16, 8).to(torch.float8_e4m3fn), "float8"),
        (torch.randn(16, 8).to_sparse(), "no plain tensor"),
        (torch.empty(16, 8, device="meta"), "no plain tensor"),
        (torch.full((16, 8), torch.nan), "not finite"),
        (torch.full((16, 8), torch.inf, dtype=torch.bfloat16), "not finite"),
        (numpy.zeros((16, 8), dtype="O"), "object"),
        ([[1.0] * 8] * 16, "list"),
        (None, "NoneType"),
    ],
)
def test_wrong_rows_are_refused(processor_of: Maker, rows: Any, message: str) -> None:
    with pytest.raises(MediaError, match=message):
        processor_of("llava").process("x", [ImageFeatures(rows, (64, 48))])


@pytest.mark.parametrize("size", [(64,), (0, 5), (-1, 5), "64x48", None, (64.0, 48.0), (True, 5), (1, 2, 3)])
def test_features_need_the_size_of_their_picture(processor_of: Maker, size: Any) -> None:
    with pytest.raises(MediaError, match=r"need the \(width, height\)"):
        processor_of("llava").process("x", [ImageFeatures(torch.randn(16, 8), size)])


def test_a_size_is_bound_like_a_pictures(builders: Any) -> None:
    processor = PromptProcessor.from_processor(builders.build("llava"), media=MediaOptions(max_image_pixels=1000))
    with pytest.raises(MediaError, match="1200 pixels are over the limit of 1000"):
        processor.process("x", [ImageFeatures(torch.randn(16, 8), (40, 30))])


@pytest.mark.parametrize("shape", [(2, 15, 8), (2, 16, 4), (16, 8), (0, 16, 8)])
def test_deepstack_rows_are_as_the_rows(processor_of: Maker, shape: tuple[int, ...]) -> None:
    with pytest.raises(MediaError, match="DeepStack rows"):
        processor_of("llava").process("x", [ImageFeatures(torch.randn(16, 8), (64, 48), torch.randn(shape))])


def test_the_width_is_the_models(builders: Any) -> None:
    text = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2}
    config = {"model_type": "llava", "text_config": text}
    processor = PromptProcessor.from_processor(builders.build("llava"), model_config=config)
    assert processor.describe()["feature_width"] == 8
    assert processor.process("x", [_rows(16, (64, 48), width=8)]).images
    with pytest.raises(MediaError, match="9 wide, but the model's are 8"):
        processor.process("x", [_rows(16, (64, 48), width=9)])
    with pytest.raises(MediaError, match="image 2 of 2"):
        processor.process("x", [noise(9, 9), _rows(16, (64, 48), width=9)])


def test_a_width_that_no_config_says_is_left_to_the_model(processor_of: Maker) -> None:
    assert processor_of("llava").describe()["feature_width"] is None


def test_cross_attention_takes_no_rows(processor_of: Maker) -> None:
    with pytest.raises(MediaError, match="by cross attention"):
        processor_of("mllama").process("x", [_rows(16, (64, 48))])


@dataclass(frozen=True)
class _Output:
    pooler_output: Any
    deepstack_features: Any = None


def test_rows_are_taken_from_what_a_model_gives() -> None:
    rows = torch.randn(6, 4)
    for form in (rows, [rows], rows.reshape(2, 3, 4), (rows[:2], rows[2:]), rows.reshape(1, 2, 3, 4)):
        assert torch.equal(ImageFeatures.of(_Output(form), (5, 5)).rows, rows)
    stacked = ImageFeatures.of(_Output(rows, [rows, rows + 1]), (5, 5)).deepstack
    assert stacked is not None
    assert stacked.shape == (2, 6, 4)
    for nothing in (None, [], "rows", [1.0], torch.tensor(1.0)):
        with pytest.raises(MediaError, match="pooler_output"):
            ImageFeatures.of(_Output(nothing), (5, 5))


def test_a_size_is_expanded_once(builders: Any) -> None:
    processor = PromptProcessor.from_processor(builders.build("qwen2_vl"))
    count = processor.process("x", [noise(64, 48)]).images[0].range.num_embeds
    for seed in range(4):
        processor.process("x", [_rows(count, (64, 48), seed=seed)])
    stats = processor.describe()["image_cache"]
    assert isinstance(stats, dict)
    assert (stats["hits"], stats["entries"]) == (3, 2)
