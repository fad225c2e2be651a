"""Several images at once, the cache of processed images, and many threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from pictures import noise

from processors import MediaError, OptionError, ProcessedPrompt, PromptError, PromptProcessor
from processors.cache import ExpansionCache
from processors.expand import Expansion, _without_repeats
from processors.hashing import canonical, image_key
from processors.picture import Picture

Maker = Callable[[str], PromptProcessor]


def _equal(one: ProcessedPrompt, other: ProcessedPrompt) -> bool:
    if one.token_ids != other.token_ids or len(one.images) != len(other.images):
        return False
    return all(
        a.key == b.key and a.range == b.range and all(torch.equal(a.tensors[n], b.tensors[n]) for n in a.tensors)
        for a, b in zip(one.images, other.images, strict=True)
    )


@pytest.mark.parametrize("family", ["idefics3", "qwen2_vl", "llava"])
def test_eight_threads_get_what_one_gets(builders: object, processor_of: Maker, family: str) -> None:
    prompts = [(f"question {i} <image>", [noise(30 + 17 * i, 200 - 13 * i, i), noise(64, 48, 99)]) for i in range(8)]
    alone = [processor_of(family).process(*prompt) for prompt in prompts]
    shared = PromptProcessor.from_processor(builders.build(family), cache_bytes=100_000, workers=3)  # type: ignore[attr-defined]
    gate = threading.Barrier(8)

    def run(index: int) -> list[ProcessedPrompt]:
        gate.wait()
        results = []
        for _ in range(3):
            shared.tokenizer("reconfigured", truncation=True, max_length=3, padding="max_length")
            results.append(shared.process(*prompts[index]))
        return results

    with ThreadPoolExecutor(8) as pool:
        for expected, results in zip(alone, pool.map(run, range(8)), strict=True):
            assert all(_equal(expected, result) for result in results)
    shared.close()
    assert _equal(shared.process(*prompts[0]), alone[0])  # closing is no end
    shared.close()


def test_eight_threads_may_have_options_of_their_own(builders: object, processor_of: Maker) -> None:
    options = [{}, *({"size": {"longest_edge": edge}} for edge in (28, 56, 84, 112)), {"do_image_splitting": False}]
    picture = noise(120, 80, 1)
    alone = [processor_of("idefics3").process("x", [picture], options=chosen) for chosen in options]
    assert len({result.images[0].key for result in alone}) == len(options)
    shared = PromptProcessor.from_processor(builders.build("idefics3"), cache_bytes=20_000)  # type: ignore[attr-defined]
    turns = [index % len(options) for index in range(48)]
    with ThreadPoolExecutor(8) as pool:
        results = pool.map(lambda index: shared.process("x", [picture], options=options[index]), turns)
        for index, result in zip(turns, results, strict=True):
            assert _equal(result, alone[index]), options[index]
    shared.close()


def test_a_repeated_image_is_not_processed_again(builders: object) -> None:
    processor = PromptProcessor.from_processor(builders.build("llava"))  # type: ignore[attr-defined]
    first = processor.process("a", [noise(50, 40, 1)])
    again = processor.process("another", [noise(50, 40, 1)])
    assert again.images[0].tensors is first.images[0].tensors
    other = processor.process("a", [noise(50, 40, 2)])
    assert other.images[0].key != first.images[0].key
    stats = processor.describe()["image_cache"]
    assert isinstance(stats, dict)
    assert (stats["hits"], stats["misses"], stats["entries"]) == (1, 2, 2)


def test_options_change_the_key_and_the_result(builders: object) -> None:
    """The same picture with three sizes, in another order the second time."""
    processor = PromptProcessor.from_processor(builders.build("qwen2_vl"))  # type: ignore[attr-defined]
    picture = noise(300, 200)
    sizes = [28 * 28 * 8, 28 * 28 * 16, 28 * 28 * 32]

    def run(size: int) -> tuple[int, str]:
        options = {"size": {"shortest_edge": 28 * 28 * 4, "longest_edge": size}}
        image = processor.process("x", [picture], options=options).images[0]
        return image.range.num_embeds, image.key

    first = [run(size) for size in sizes]
    assert len({count for count, _ in first}) == len({key for _, key in first}) == 3
    assert all(count * 28 * 28 <= size for (count, _), size in zip(first, sizes, strict=True))
    assert [run(size) for size in reversed(sizes)] == first[::-1]


def test_unknown_options_are_refused_by_name(processor_of: Maker) -> None:
    with pytest.raises(OptionError, match=r"max_pixel_s.*takes: .*size"):
        processor_of("qwen2_vl").process("x", [noise(9, 9)], options={"max_pixel_s": 5})
    for name in ("return_tensors", "image_seq_length", "patch_size"):
        with pytest.raises(OptionError, match=name):
            processor_of("qwen2_vl").check_options({name: 4})


@pytest.mark.parametrize("value", ["large", -1, {"a": 1}])
def test_impossible_option_values_are_refused(processor_of: Maker, value: object) -> None:
    with pytest.raises(OptionError):
        processor_of("qwen2_vl").process("x", [noise(60, 60)], options={"size": value})


def test_options_must_be_plain_values(processor_of: Maker) -> None:
    with pytest.raises(OptionError, match="plain values"):
        processor_of("qwen2_vl").process("x", [noise(60, 60)], options={"image_mean": object()})


def test_the_failing_image_is_named(processor_of: Maker) -> None:
    with pytest.raises(MediaError, match=r"image 2 of 3: .*empty"):
        processor_of("llava").process("x", [noise(20, 20), b"", noise(20, 20)])


def test_a_failure_leaves_nothing_behind(builders: object) -> None:
    """A refused prompt, then a good one with the same image, then many with a cache of two."""
    one = noise(40, 40, 1)
    size = PromptProcessor.from_processor(builders.build("llava")).process("x", [one]).images[0]  # type: ignore[attr-defined]
    limit = 2 * sum(t.numel() * t.element_size() for t in size.tensors.values())
    processor = PromptProcessor.from_processor(builders.build("llava"), cache_bytes=limit)  # type: ignore[attr-defined]
    with pytest.raises(MediaError):
        processor.process("x", [one, b""])
    expected = processor.process("x", [one])
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda i: processor.process("x", [noise(40, 40, i % 5)]), range(20)))
    assert _equal(results[1], expected)
    stats = processor.describe()["image_cache"]
    assert isinstance(stats, dict)
    assert stats["bytes"] <= limit
    processor.close()


def test_names_take_the_place_of_pixels(processor_of: Maker) -> None:
    processor = processor_of("llava")
    pictures = [noise(40, 40, 1), noise(40, 40, 2)]
    named = processor.process("x", pictures, image_ids=["a", None])
    assert named.images[0].key == processor.process("y", [noise(40, 40, 3)], image_ids=["a"]).images[0].key
    assert named.images[0].key != processor.process("y", [pictures[0]]).images[0].key
    assert named.images[1].key == processor.process("y", [pictures[1]]).images[0].key
    with pytest.raises(PromptError, match="1 image ids were given for 2 images"):
        processor.process("x", pictures, image_ids=["a"])


def test_keys_tell_sizes_palettes_and_processors_apart() -> None:
    flat = [noise(30, 150), noise(150, 30)]
    flat = [picture.point(lambda _: 7) for picture in flat]
    assert flat[0].tobytes() == flat[1].tobytes()
    one, turned = (Picture(picture) for picture in flat)
    keys = {image_key(one, {}, "p"), image_key(turned, {}, "p"), image_key(one, {}, "q")}
    keys |= {image_key(one, {"a": 1}, "p"), image_key(one, {}, "p", "name")}
    assert len(keys) == 5
    assert all(len(key) == 64 for key in keys)
    assert canonical({"a": 1, "b": 2}) == canonical({"b": 2, "a": 1})


def _expansion(size: int) -> Expansion:
    return Expansion("x", {"t": torch.zeros(size, dtype=torch.uint8)})


def test_the_cache_keeps_to_its_bytes() -> None:
    cache = ExpansionCache(10_000)
    for name in "abc":
        cache.put(name, _expansion(3000))
    assert cache.get("a") is None
    assert cache.get("b") is not None
    cache.put("d", _expansion(3000))
    assert cache.get("c") is None  # b was asked for later
    cache.put("e", _expansion(10_001))
    assert cache.get("e") is None
    stats = cache.stats()
    assert 6000 < stats.pop("bytes") <= 10_000
    assert stats == {"entries": 2, "max_bytes": 10_000, "hits": 1, "misses": 3}
    for number in range(100):  # without tensors an entry takes room too
        cache.put(f"empty {number}", Expansion("x", {}))
    assert cache.stats()["entries"] < 10
    cache.clear()
    assert cache.stats()["bytes"] == 0
    with pytest.raises(ValueError, match="negative"):
        ExpansionCache(-1)


@pytest.mark.parametrize("family", ["idefics3"])
def test_a_mask_of_ones_takes_no_memory_and_reads_as_it_was(processor_of: Maker, family: str) -> None:
    image = processor_of(family).process("<image>", [noise(120, 90)], raw=True).images[0]
    mask, pixels = image.tensors["pixel_attention_mask"], image.tensors["pixel_values"]
    assert mask.dtype == torch.int64
    assert mask.shape == (*pixels.shape[:2], *pixels.shape[3:])
    assert torch.equal(mask, torch.ones_like(mask))
    assert image.nbytes() < pixels.untyped_storage().nbytes() + 64


@pytest.mark.parametrize(
    "value",
    [torch.ones(8192), torch.ones(9, dtype=torch.int64), torch.arange(8192), torch.tensor([[True] * 8191 + [False]])],
    ids=["floats", "few", "different", "one other"],
)
def test_what_is_not_one_integer_throughout_stays_as_it_is(value: torch.Tensor) -> None:
    assert _without_repeats(value) is value
