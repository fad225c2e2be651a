"""Options of a request can not make an image so large, or cut it into so many tiles, that memory runs out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pictures import noise
from PIL import Image

from processors import MediaOptions, OptionError, ProcessorError, PromptProcessor

Maker = Callable[[str], PromptProcessor]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("idefics3", {"size": {"longest_edge": 10**6}}),
        ("idefics3", {"size": {"height": 10_000, "width": 10_000}}),
        ("idefics3", {"size": [10_000, 10_000]}),
        ("idefics3", {"size": 1e10}),
        ("idefics3", {"max_image_size": {"longest_edge": 20_000}}),
        ("idefics3", {"max_image_size": {"longest_edge": 1}}),
        ("idefics3", {"max_image_size": {"longest_edge": 1e-3}}),
        ("idefics3", {"size": {"height": -5}}),
        ("idefics3", {"size": float("nan")}),
        ("idefics3", {"pad_size": {"height": 10**400, "width": 1}}),
        ("llava", {"crop_size": {"height": 16_384, "width": 16_384}}),
        ("llava", {"size": {"shortest_edge": 5_000}}),
        ("llava_next", {"image_grid_pinpoints": [[56, 56], [56, 56_000]]}),
        ("gemma3", {"pan_and_scan_max_num_crops": 10**6}),
        ("internvl", {"min_patches": 10**6}),
        ("qwen2_vl", {"min_pixels": 10**10}),
        ("qwen2_vl", {"size": {"shortest_edge": 10**10, "longest_edge": 10**11}}),
    ],
)
def test_options_that_lead_to_too_much_are_refused_by_name(
    processor_of: Maker, family: str, options: dict[str, object]
) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        processor_of(family).check_options(options)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("idefics3", {"size": {"longest_edge": 364}}),
        ("idefics3", {"do_image_splitting": False, "image_mean": [-1, 0, 0], "resample": 2}),
        ("llava", {"crop_size": {"height": 2_000, "width": 2_000}, "size": {"shortest_edge": 2_000}}),
        ("gemma3", {"do_pan_and_scan": True, "pan_and_scan_max_num_crops": 8}),
        ("qwen2_vl", {"max_pixels": 16384 * 28 * 28}),
        ("qwen2_vl", {"size": {"shortest_edge": 56 * 56, "longest_edge": 16384 * 28 * 28}}),
    ],
)
def test_ordinary_options_are_taken(processor_of: Maker, family: str, options: dict[str, object]) -> None:
    processor_of(family).check_options(options)


def test_the_limit_for_pictures_is_one_for_options_too(builders: object) -> None:
    media = MediaOptions(max_image_pixels=10_000)
    processor = PromptProcessor.from_processor(builders.build("llava"), media=media)  # type: ignore[attr-defined]
    with pytest.raises(OptionError, match=r"crop_size.*10,000 \(max_image_pixels\)"):
        processor.process("x", [noise(50, 50)], options={"crop_size": {"height": 101, "width": 100}})


def test_a_narrow_picture_is_refused_before_its_short_side_is_set(processor_of: Maker) -> None:
    """56 pixels for the one row of this picture would be 314 million pixels."""
    narrow = Image.new("RGB", (100_000, 1))
    with pytest.raises(ProcessorError, match=r"100000x1 would be resized .*over the limit"):
        processor_of("llava").process("x", [narrow])
    with pytest.raises(OptionError, match="short side of 40"):
        processor_of("llava").process("x", [narrow], options={"size": {"shortest_edge": 40}})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_std": [0, 0, 0]}, "must not hold 0, by which pixels would be divided"),
        ({"image_std": [0.5, 0.5, 0.0]}, "must not hold 0"),
        ({"image_mean": [float("inf"), 0, 0]}, "must be finite"),
        ({"rescale_factor": float("nan")}, "must be finite"),
    ],
)
def test_a_scale_that_makes_no_numbers_is_refused(
    processor_of: Maker, options: dict[str, object], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        processor_of("llava").process("x", [noise(20, 20)], options=options)
