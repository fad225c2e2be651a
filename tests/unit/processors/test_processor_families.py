"""Families one by one: ids, tensors and counts against the processor's own call, over many sizes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from pictures import ROOT, noise

from processors import ProcessorError, PromptProcessor
from processors.expand import TEXT_OUTPUTS

Maker = Callable[[str], PromptProcessor]

SIZES = [(1, 1), (1, 50), (3, 4), (28, 28), (97, 61), (120, 300), (300, 20)]
FAMILIES = [
    "aya_vision", "cohere2_vision", "emu3", "ernie4_5_vl_moe", "gemma3", "glm4v", "got_ocr2",
    "hunyuan_vl", "idefics2", "idefics3", "internvl", "kimi_k25", "lfm2_vl", "llama4", "llava",
    "llava_next", "llava_onevision", "minicpmv4_6", "mistral3", "ovis2", "paligemma", "perception_lm",
    "qianfan_ocr", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "smolvlm", "video_llama_3",
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_every_size_equals_the_processors_own_call(processor_of: Maker, family: str) -> None:
    processor = processor_of(family)
    expander = processor._loaded.expander
    prompt = f"{expander.image_text} What?"
    seen = 0
    for seed, size in enumerate(SIZES):
        picture = noise(*size, seed)
        try:
            ours = processor.process(prompt, [picture], raw=True)
        except ProcessorError:
            with pytest.raises(Exception):  # noqa: B017, PT011 - whatever it raises, it refuses this size too
                _refused(expander, prompt, picture)
            continue
        own = expander.call(prompt, [picture], {})
        assert list(ours.token_ids) == own["input_ids"][0].tolist(), size
        tensors = ours.images[0].tensors
        for name in set(own) - TEXT_OUTPUTS - {"labels", *processor._loaded.family.prompt_outputs}:
            assert torch.equal(tensors[name], torch.as_tensor(own[name])), (size, name)
        seen += 1
    assert seen >= 5


def _refused(expander: Any, prompt: str, picture: Any) -> None:
    outputs = expander.call(prompt, [picture], {})
    if not any(outputs["text_replacement_offsets"][0]):
        raise ValueError("no tokens")
    if not outputs["text_replacement_offsets"][0][0]["replacement"]:
        raise ValueError("no tokens")


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "perception_lm"])
def test_several_images_equal_the_processors_own_call(processor_of: Maker, family: str) -> None:
    """Touching and apart. (Perception LM's own call takes no images of different tile counts.)"""
    processor = processor_of(family)
    expander = processor._loaded.expander
    pictures = [noise(97, 61, 1), noise(40, 90, 2), noise(64, 64, 3)]
    mark = expander.image_text
    prompt = f"{mark}{mark} and \n{mark}What?"
    own = expander.call(prompt, pictures, {})
    ours = processor.process(prompt, pictures, raw=True)
    assert list(ours.token_ids) == own["input_ids"][0].tolist()
    for before, after in itertools.pairwise(ours.images):
        assert before.range.end <= after.range.offset
    assert [image.size for image in ours.images] == [p.size for p in pictures]


RECORDED = json.loads((ROOT / "fixtures/tiny_processors/recorded.json").read_text())


@pytest.mark.parametrize("family", RECORDED["families"])
def test_recorded_prompts_still_hold(processor_of: Maker, family: str) -> None:
    """What every family made of pictures of odd sizes, none to three, touching and apart; a change of it shows.

    A third of the grid each, another one for the next family; `record.py --check` replays it all.
    """
    from fixtures.tiny_processors.grid import CASES, replay

    assert [[case.layout, [list(size) for size in case.sizes]] for case in CASES] == RECORDED["cases"]
    outcomes = RECORDED["families"][family]
    processor = processor_of(family)
    for index in range(list(RECORDED["families"]).index(family) % 3, len(CASES), 3):
        assert replay(processor, CASES[index]) == outcomes[index], CASES[index]


def test_every_family_that_loads_is_recorded() -> None:
    """With prompts of one picture, and of several wherever the family takes several."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as MODELS
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES as NAMES

    from processors.families.table import family_of

    loadable = {m for m in MODELS if m in NAMES and family_of(NAMES[m]).refused is None}
    assert set(RECORDED["families"]) == loadable
    for family, outcomes in RECORDED["families"].items():
        most = max(len(outcome.get("ranges", ())) for outcome in outcomes)
        assert most == (1 if family == "fuyu" else 3), family


@pytest.mark.parametrize("text", ["What is it?", "\nWhat?", " two  spaces ", "a <0x04> b"])
def test_fuyus_image_stands_in_front(processor_of: Maker, text: str) -> None:
    processor = processor_of("fuyu")
    expander = processor._loaded.expander
    for seed, size in enumerate([(1, 1), (3, 4), (28, 28), (97, 61), (61, 97), (640, 480), (200, 20)]):
        picture = noise(*size, seed)
        own = expander.call(text, [picture], {})
        for prompt in (text, f"<image>{text}", f"|SPEAKER|{text}", f"<s><image>{text}"):
            ours = processor.process(prompt, [picture], raw=True)
            assert list(ours.token_ids) == own["input_ids"][0].tolist(), (size, prompt)
            assert list(ours.mm_token_type_ids) == own["mm_token_type_ids"][0].tolist()
            image = ours.images[0]
            assert torch.equal(image.tensors["pixel_values"], own["pixel_values"])
            assert image.range.num_embeds == own["pixel_values"].shape[0]
            ids = ours.token_ids[image.range.offset : image.range.end]
            newline = processor.tokenizer.convert_tokens_to_ids("|NEWLINE|")
            assert image.range.length - image.range.num_embeds == ids.count(newline)
            assert processor.process(list(ours.token_ids), [picture]).images[0].range == image.range
    assert list(processor.process(text).token_ids) == expander._processor(text=[text])["input_ids"][0]


def test_fuyu_refuses_what_its_processor_would_move(processor_of: Maker) -> None:
    from processors import PromptError

    processor = processor_of("fuyu")
    with pytest.raises(PromptError, match="put no text before the image"):
        processor.process("What is <image>?", [noise(30, 30)], raw=True)
    with pytest.raises(PromptError, match=r"at most 1 image a prompt, but 2 were given"):
        processor.process("x", [noise(30, 30)] * 2)
    with pytest.raises(PromptError, match="<box>"):
        processor.process("What is in <box>1, 2, 3, 4</box>?", [noise(30, 30)])


def test_an_image_among_others_is_processed_as_its_family_does(processor_of: Maker) -> None:
    """LLaVA-OneVision tiles an image only if it is alone."""
    processor = processor_of("llava_onevision")
    picture = noise(150, 60, 1)
    alone = processor.process("x", [picture]).images[0]
    among = processor.process("x", [picture, noise(60, 60, 2)]).images[0]
    assert alone.range.num_embeds > among.range.num_embeds
    assert alone.key != among.key
    assert among.tensors["pixel_values"].shape[1] == 1


def test_images_are_numbered_where_the_family_numbers_them(processor_of: Maker) -> None:
    processor = processor_of("minicpmv4_6")
    result = processor.process("x", [noise(60, 60, 5), noise(60, 60, 5)])
    texts = [processor.tokenizer.decode(result.token_ids[i.range.offset : i.range.end]) for i in result.images]
    assert texts[0].startswith("<image_id_start>0<image_id_end>")
    assert texts[1] == texts[0].replace(">0<", ">1<")
    again = processor.process(list(result.token_ids), [noise(60, 60, 5), noise(60, 60, 5)])
    assert [image.range for image in again.images] == [image.range for image in result.images]


def test_what_belongs_to_the_whole_prompt_is_not_an_images(processor_of: Maker) -> None:
    processor = processor_of("ernie4_5_vl_moe")
    for text in ("x", "a longer question about it"):
        result = processor.process(text, [noise(60, 60)])
        assert "moe_mm_token_type_ids" not in result.images[0].tensors
        assert result.prompt_tensors["moe_mm_token_type_ids"].shape == (1, len(result.token_ids))
    assert processor.process("no image").prompt_tensors["moe_mm_token_type_ids"].sum() == 0


@pytest.mark.parametrize("prompt", ["<image>What?", "a<image><image> b", "<image><image>", "a<image>b<image>"])
def test_images_beside_the_prompt_are_told_by_a_mask(processor_of: Maker, prompt: str) -> None:
    """Mllama: one token an image that takes no row, and a cross-attention mask over the whole prompt."""
    processor = processor_of("mllama")
    pictures = [noise(97, 61, 1), noise(40, 300, 2)][: prompt.count("<image>")]
    ours = processor.process(prompt, pictures, raw=True)
    own = processor._loaded.expander.call(prompt, pictures, {})
    assert list(ours.token_ids) == own["input_ids"][0].tolist()
    assert torch.equal(ours.prompt_tensors["cross_attention_mask"], own["cross_attention_mask"])
    for name in ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask"):
        assert torch.equal(torch.cat([image.tensors[name] for image in ours.images], dim=1), own[name])
    assert [(i.range.length, i.range.num_embeds) for i in ours.images] == [(1, 0)] * len(pictures)
    assert not processor.process("text").prompt_tensors


def test_mllamas_tiles_are_the_models(processor_of: Maker) -> None:
    """The number of an arrangement of tiles means another one under another maximum: a model would read it wrongly."""
    from processors import OptionError

    processor = processor_of("mllama")
    for tiles in (1, 2, 8):
        with pytest.raises(OptionError, match=r"max_image_tiles can not be set by a request.*size"):
            processor.process("<image>x", [noise(97, 61)], raw=True, options={"max_image_tiles": tiles})
    small = processor.process("x", [noise(97, 61)], options={"size": {"height": 28, "width": 28}})
    tiles = small.images[0].tensors["pixel_values"].shape[2]
    assert small.prompt_tensors["cross_attention_mask"].shape[-1] == tiles


def test_paligemma_needs_an_image(processor_of: Maker) -> None:
    from processors import PromptError

    with pytest.raises(PromptError, match="without an image"):
        processor_of("paligemma").process("x")


@pytest.mark.parametrize(
    ("family", "bounded"), [("llava", True), ("qwen2_vl", True), ("idefics3", True), ("ovis2", True)]
)
def test_the_largest_image(processor_of: Maker, family: str, bounded: bool) -> None:
    processor = processor_of(family)
    largest = processor.largest_image()
    assert largest.bounded is bounded
    assert processor.max_image_tokens() == largest.length
    image = processor.process("x", [noise(*largest.size)]).images[0]
    assert (image.range.length, image.range.num_embeds) == (largest.length, largest.num_embeds)
    for size in [(500, 400), (64, 700), (333, 334), (900, 150)]:
        assert processor.process("x", [noise(*size)]).images[0].range.length <= largest.length


@pytest.mark.parametrize("family", ["mistral3", "qwen2_5_vl"])
def test_the_largest_image_is_found_without_making_a_huge_one(
    builders: Any, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """With real sizes: pictures of 10,000 a side are asked about, and one that takes as many tokens is made."""
    from PIL import Image

    from fixtures.tiny_processors.builders import RECIPES, Recipe

    recipe = RECIPES.get(family, Recipe())
    real = {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}} if family == "qwen2_5_vl" else {}
    processor = PromptProcessor.from_processor(builders.build(family, replace(recipe, image_arguments=real)))
    made: list[int] = []
    original = Image.new

    def new(mode: str, size: tuple[int, int], *rest: Any) -> Any:
        made.append(size[0] * size[1])
        return original(mode, size, *rest)

    monkeypatch.setattr(Image, "new", new)
    largest = processor.largest_image()
    assert largest.bounded
    assert largest.length > 1000
    assert max(made) < 3_000_000
    declared = processor._loaded.counts
    for size in ((10_000, 10_000), (10_000, 7_500), (2_000, 9_000)):
        assert (declared.declared(size) or 0) <= max(largest.num_embeds, largest.length)


def test_splitting_can_be_switched_off_for_a_request(processor_of: Maker) -> None:
    processor = processor_of("idefics3")
    split = processor.process("x", [noise(120, 80)]).images[0]
    whole = processor.process("x", [noise(120, 80)], options={"do_image_splitting": False}).images[0]
    assert whole.tensors["pixel_values"].shape[1] == 1
    assert split.tensors["pixel_values"].shape[1] > 1
    assert whole.range.num_embeds == 4
    assert split.range.num_embeds == 4 * split.tensors["pixel_values"].shape[1]
    pictures = [noise(20, 20), noise(120, 80)]
    for options in ({}, {"do_image_splitting": False}):  # an image that is not split is one tile, not none
        for picture, image in zip(pictures, processor.process("x", pictures, options=options).images, strict=True):
            alone = processor.process("x", [picture], options=options).images[0]
            assert torch.equal(image.tensors["pixel_values"], alone.tensors["pixel_values"])
            assert image.range.num_embeds == 4 * image.tensors["pixel_values"].shape[1] > 0
