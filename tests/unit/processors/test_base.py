"""The whole way: ids equal to transformers' own, one range and one set of tensors an image."""

from __future__ import annotations

import base64
import io
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pictures import noise
from PIL import Image

from processors import ProcessedPrompt, PromptError, PromptProcessor

FAMILIES = ["idefics3", "llava", "qwen2_vl", "qwen3_vl", "gemma3", "mistral3", "internvl"]
SIZES = [(64, 48), (300, 120), (30, 200)]

Maker = Callable[[str], PromptProcessor]


def _pictures(count: int) -> list[Image.Image]:
    return [noise(*size, seed) for seed, size in enumerate(SIZES[:count])]


def _reference(builders: object, family: str, content: list[dict[str, object]]) -> tuple[list[int], list[int]]:
    """Ids and token types from transformers alone."""
    processor = builders.build(family)  # type: ignore[attr-defined]
    outputs = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        tokenize=True,
        return_dict=True,
        add_generation_prompt=True,
        processor_kwargs={"return_mm_token_type_ids": True},
    )
    types = outputs.get("mm_token_type_ids", outputs.get("token_type_ids"))
    flat = [list(map(int, v[0])) for v in (outputs["input_ids"], types)]
    return flat[0], flat[1]


def _same_tensors(one: ProcessedPrompt, index: int, other: ProcessedPrompt, other_index: int) -> bool:
    a, b = one.images[index].tensors, other.images[other_index].tensors
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_ids_and_types_equal_transformers(builders: object, processor_of: Maker, family: str, count: int) -> None:
    pictures = _pictures(count)
    content: list[dict[str, object]] = [{"type": "image", "image": picture} for picture in pictures]
    content.append({"type": "text", "text": "What differs here?"})
    ids, types = _reference(builders, family, content)
    ours = processor_of(family).process("What differs here?", pictures)
    assert list(ours.token_ids) == ids
    assert list(ours.mm_token_type_ids) == types


@pytest.mark.parametrize("family", FAMILIES)
def test_touching_images_have_a_range_each(processor_of: Maker, family: str) -> None:
    processor = processor_of(family)
    token = processor.describe()["image_token"]
    result = processor.process(f"a{token}{token}b{token}", _pictures(3), raw=True)
    ranges = [image.range for image in result.images]
    assert len(ranges) == 3
    for before, after in itertools.pairwise(ranges):
        assert before.end <= after.offset
    features = [i for i, t in enumerate(result.token_ids) if t == processor.image_token_id]
    assert [p for r in ranges for p in r.embed_positions()] == features
    assert [image.size for image in result.images] == SIZES


@pytest.mark.parametrize("family", FAMILIES)
def test_an_image_has_the_same_tensors_alone_and_among_others(processor_of: Maker, family: str) -> None:
    processor = processor_of(family)
    pictures = _pictures(3)
    together = processor.process("x", pictures)
    for index, picture in enumerate(pictures):
        alone = processor.process("another text", [picture])
        assert _same_tensors(alone, 0, together, index)
        assert alone.images[0].key == together.images[index].key
        assert alone.images[0].range.num_embeds == together.images[index].range.num_embeds
    assert len({image.key for image in together.images}) == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_user_text_with_the_image_token_stays_text(processor_of: Maker, family: str) -> None:
    processor = processor_of(family)
    token = str(processor.describe()["image_token"])
    plain = processor.process("before after", _pictures(1))
    typed = processor.process(f"before {token} after", _pictures(1))
    assert len(typed.images) == 1
    assert typed.images[0].range == plain.images[0].range
    assert typed.token_ids.count(processor.image_token_id) == plain.token_ids.count(processor.image_token_id)
    assert processor.tokenizer.decode(typed.token_ids).count(f"before {token} after") == 1
    no_image = processor.process(f"what is {token}?")
    assert not no_image.images
    assert not set(no_image.token_ids) & set(processor.placeholder_token_ids)


def test_the_users_token_in_front_of_the_image(processor_of: Maker) -> None:
    processor = processor_of("llava")
    content = [{"type": "text", "text": "<image> or "}, {"type": "image", "image": noise(50, 50)}]
    result = processor.process([{"role": "user", "content": content}])
    assert len(result.images) == 1
    start = result.images[0].range.offset
    assert processor.tokenizer.decode(result.token_ids[:start]).endswith("<image> or ")


@pytest.mark.parametrize("family", ["llava", "qwen2_vl", "mllama", "idefics3", "fuyu"])
@pytest.mark.parametrize(("positions", "count"), [(2, 1), (1, 0), (1, 2)])
def test_a_count_mismatch_names_both_numbers(processor_of: Maker, family: str, positions: int, count: int) -> None:
    """Before anything runs: no picture is processed."""
    processor = processor_of(family)
    misses = processor.describe()["image_cache"]["misses"]  # type: ignore[index]
    pictures = [noise(61, 47, 1000 + 10 * positions + seed) for seed in range(count)]
    for mark in ("<image>", str(processor.describe()["image_token"])):
        if mark == "<image>" != processor.describe()["image_token"] and not count:
            continue  # without images a neutral mark is text
        with pytest.raises(PromptError, match=rf"has {positions} image positions .* but {count} images"):
            processor.process(mark * positions, pictures, raw=True)
    if processor.has_chat_template:
        content = [{"type": "image"}] * positions
        with pytest.raises(PromptError, match=rf"{positions} image parts .* but {count} images"):
            processor.process([{"role": "user", "content": content}], pictures)
    assert processor.describe()["image_cache"]["misses"] == misses  # type: ignore[index]


@pytest.mark.parametrize("role", ["system", "assistant", "tool"])
def test_an_image_in_any_turn_is_seen_or_refused(processor_of: Maker, builders: Any, role: str) -> None:
    """The tiny families' template renders images in every turn; one that leaves some out is an error, not a loss."""
    turns = [{"role": role, "content": [{"type": "image", "image": noise(50, 40)}]}, {"role": "user", "content": "x"}]
    assert len(processor_of("llava").process(turns).images) == 1
    deaf = builders.build("llava")
    deaf.chat_template = deaf.chat_template.replace("'image' %}", "'image' and message['role'] == 'user' %}")
    with pytest.raises(PromptError, match=f"wrote 0 image tokens for 1 images .*{role}"):
        PromptProcessor.from_processor(deaf).process(turns)


def test_a_turned_picture_is_the_picture_turned(processor_of: Maker) -> None:
    """Orientation comes before size, tokens and key."""
    exif = Image.Exif()
    exif[0x0112] = 6
    picture = noise(240, 60)
    stream = io.BytesIO()
    picture.save(stream, "PNG", exif=exif)
    tagged, turned = (
        processor_of("qwen2_vl").process("x", [source]).images[0]
        for source in (stream.getvalue(), picture.transpose(Image.Transpose.ROTATE_270))
    )
    assert tagged.size == (60, 240)
    assert (tagged.key, tagged.range) == (turned.key, turned.range)


def test_a_data_url_counts_as_the_picture_that_it_carries(processor_of: Maker) -> None:
    stream = io.BytesIO()
    noise(320, 300).save(stream, "PNG")
    url = "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
    assert len(url) > 300_000
    part = {"type": "image_url", "image_url": {"url": url}}
    sent = processor_of("llava").process([{"role": "user", "content": [part, {"type": "text", "text": "x"}]}])
    given = processor_of("llava").process("x", [noise(320, 300)])
    assert sent.token_ids == given.token_ids
    assert sent.images[0].key == given.images[0].key
    assert url not in sent.text


def test_raw_prompts_take_tokens_or_marks_or_images_first(processor_of: Maker) -> None:
    processor = processor_of("qwen2_vl")
    pictures = _pictures(1)
    own = processor.process("a<|vision_start|><|image_pad|><|vision_end|>b", pictures, raw=True)
    mark = processor.process("a<image>b", pictures, raw=True)
    assert own.token_ids == mark.token_ids
    first = processor.process("ab", pictures, raw=True)
    assert first.images[0].range.offset == 1  # behind <|vision_start|>
    assert len(first.token_ids) == len(own.token_ids)


def test_interleaved_parts_keep_their_order(processor_of: Maker) -> None:
    processor = processor_of("qwen2_vl")
    red, blue = noise(64, 48, 1), noise(30, 200, 2)
    content = [
        {"type": "image", "image": red},
        {"type": "text", "text": "then"},
        {"type": "image"},
        {"type": "text", "text": "?"},
    ]
    messages = [{"role": "user", "content": content}]
    result = processor.process(messages, [blue])
    assert [image.size for image in result.images] == [(64, 48), (30, 200)]
    between = result.token_ids[result.images[0].range.end : result.images[1].range.offset]
    assert "then" in processor.tokenizer.decode(between)


def test_an_empty_prompt_needs_an_image(processor_of: Maker) -> None:
    with pytest.raises(PromptError, match="empty"):
        processor_of("llava").process("")
    assert len(processor_of("llava").process("", _pictures(1)).images) == 1


@pytest.mark.parametrize("images", ["photo.jpg", b"bytes", noise(9, 9), 5])
def test_one_image_must_be_in_a_list_too(processor_of: Maker, images: object) -> None:
    with pytest.raises(PromptError, match="must be a list"):
        processor_of("llava").process("x", images)  # type: ignore[arg-type]


@pytest.mark.parametrize("raw", [True, False])
def test_text_that_is_no_unicode_is_refused(processor_of: Maker, raw: bool) -> None:
    with pytest.raises(PromptError, match="encoded"):
        processor_of("llava").process("a\ud800b", _pictures(1), raw=raw)
    assert processor_of("llava").process("\0\u200b\U0010ffff", _pictures(1), raw=raw, image_ids=["\ud800"]).images


@pytest.mark.parametrize("prompt", [5, None, {"role": "user"}, b"x", [], [1.5], [[1]], ["x"], [True, False]])
def test_other_prompts_are_refused(processor_of: Maker, prompt: object) -> None:
    with pytest.raises(PromptError):
        processor_of("llava").process(prompt)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["gemma3", "llava", "mistral3", "emu3", "paligemma", "mllama"])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_exactly_one_beginning_token(processor_of: Maker, family: str, count: int) -> None:
    """By the tokenizer, the template, the processor or the caller: chat and raw, with and without images."""
    processor = processor_of(family)
    if family == "paligemma" and not count:
        return  # it takes no text alone
    bos = processor.tokenizer.bos_token_id
    for prompt, raw in [("hello", True), ("<s>hello", True), ("hello", False)]:
        result = processor.process(prompt, _pictures(count), raw=raw)
        assert result.token_ids.count(bos) == 1, (prompt, raw)
        if raw or family != "paligemma":  # of which the tiny template, unlike its own processor, writes a role in front
            assert next(i for i in result.token_ids if i not in _of_images(result)) == bos, (prompt, raw)


def _of_images(result: ProcessedPrompt) -> set[int]:
    return {result.token_ids[i] for image in result.images for i in range(image.range.offset, image.range.end)}


@pytest.mark.parametrize("family", FAMILIES)
def test_expanded_ids_are_recognised(processor_of: Maker, family: str) -> None:
    processor = processor_of(family)
    pictures = _pictures(2)
    text = processor.process("What?", pictures)
    ids = processor.process(list(text.token_ids), pictures)
    assert ids.token_ids == text.token_ids
    for one, other in zip(ids.images, text.images, strict=True):
        assert one.range.embed_positions() == other.range.embed_positions()


def test_ids_of_another_size_are_refused(processor_of: Maker) -> None:
    processor = processor_of("qwen2_vl")
    ids = list(processor.process("What?", [noise(300, 120)]).token_ids)
    with pytest.raises(PromptError, match=r"image tokens"):
        processor.process(ids, [noise(64, 64)])


def test_ids_with_one_placeholder_an_image_are_filled_in(processor_of: Maker) -> None:
    processor = processor_of("mistral3")
    placeholder = processor.tokenizer.convert_tokens_to_ids("[IMG]")
    text = processor.tokenizer.encode("ab", add_special_tokens=False)
    result = processor.process([*text, placeholder, *text, placeholder], _pictures(2))
    assert [image.range.offset for image in result.images] == [2, 2 + result.images[0].range.length + 2]
    assert result.images[1].range.end == len(result.token_ids)
    again = processor.process(list(result.token_ids), _pictures(2))
    assert [i.range for i in again.images] == [i.range for i in result.images]


def test_structural_tokens_are_in_the_range_and_not_in_the_mask(processor_of: Maker) -> None:
    processor = processor_of("mistral3")
    image = processor.process("x", [noise(64, 48)]).images[0]
    rows, columns = 3, 4  # 16-pixel patches: a break token behind each row but the last, an end token behind that
    assert image.range.length == rows * (columns + 1)
    assert image.range.num_embeds == rows * columns
    assert image.range.is_embed == (*(([True] * columns + [False]) * rows),)


def test_text_only(processor_of: Maker) -> None:
    result = processor_of("qwen2_vl").process("Hello")
    assert result.images == ()
    assert set(result.mm_token_type_ids) == {0}
    assert len(result.mm_token_type_ids) == len(result.token_ids)


def test_describe_is_json(processor_of: Maker) -> None:
    import json

    text = json.dumps(processor_of("idefics3").describe())
    assert "Idefics3Processor" in text


@pytest.mark.parametrize("family", ["qwen2_vl", "llava", "idefics3", "mistral3"])
def test_no_text_in_any_turn_makes_a_placeholder(processor_of: Maker, family: str) -> None:
    """Control tokens, halves of them, template code, marker characters, names and tool arguments: all stay text."""
    processor = processor_of(family)
    token = str(processor.describe()["image_token"])
    picture = {"type": "image", "image": noise(50, 40)}
    length = processor.process("x", [noise(50, 40)]).images[0].range.length
    own = set(processor.placeholder_token_ids)
    texts = [token * 9, token[:-1], token + token[:3], f"\U000f0000{token}\U000f0001", "{{ 7*7 }}{% raw %}", "\x00\x01",
             "</s>\n[assistant]", f"\u202e{token}", "<image><s></s>[IMG_END]<|vision_start|>"]  # fmt: skip
    for text in texts:
        part = {"type": "text", "text": text}
        for messages in (
            [{"role": "user", "content": [part, picture, part]}],
            [
                {"role": "system", "content": text},
                {"role": "user", "content": text},
                {"role": "assistant", "content": [part], "tool_calls": [{"name": token, "arguments": {token: token}}]},
                {"role": "tool", "content": text, "name": token, "tool_call_id": token},
                {"role": "user", "content": [picture]},
            ],
        ):
            result = processor.process(messages)
            spans = [range(i.range.offset, i.range.end) for i in result.images]
            assert [len(span) for span in spans] == [length], text
            assert not [i for i, t in enumerate(result.token_ids) if t in own and i not in spans[0]], text


@pytest.mark.parametrize("family", ["qwen2_vl", "llava", "mistral3"])
def test_ids_with_a_wrong_expansion_are_refused(processor_of: Maker, family: str) -> None:
    processor = processor_of(family)
    picture = noise(50, 40)
    made = processor.process("x", [picture])
    ids, place = list(made.token_ids), made.images[0].range
    own = next(i for i in range(place.offset, place.end) if ids[i] in processor.placeholder_token_ids)
    for wrong in (
        ids[:own] + ids[own + 1 :],
        ids[:own] + ids[own : own + 1] + ids[own:],
        ids + ids[place.offset : place.end],
        [i for i in ids if i not in processor.placeholder_token_ids],
        [-1, *ids],
        [],
    ):
        with pytest.raises(PromptError):
            processor.process(wrong, [picture])


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_ids_that_the_model_does_not_have_are_refused(builders: Any, family: str) -> None:
    """Up to the larger of tokenizer and model, whose table may have more rows; the text part says how many."""
    processor = PromptProcessor.from_processor(builders.build(family))
    known = max(processor.tokenizer.get_vocab().values()) + 1
    config = {"model_type": family, "text_config": {"vocab_size": known + 50}, "vocab_size": 5}
    padded = PromptProcessor.from_processor(builders.build(family), model_config=config)
    for made, number in ((processor, known), (padded, known + 50)):
        assert made.process([1, number - 1]).token_ids == (1, number - 1)
        for wrong in (number, 10**9, 10**60, -1):
            with pytest.raises(
                PromptError, match=rf"token id {str(wrong)[:20]}.* at index 1 .*ids are 0 to {number - 1}$"
            ):
                made.process([1, wrong, 2])
