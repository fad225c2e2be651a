"""The processor layer against the bare Hugging Face processor, on the same pictures.

Seven figures: the bare processor's own chat call, one picture after the other; this layer doing the same, nothing kept;
this layer with all pictures in one prompt: on one thread alone, one after the other with torch's own threads, and side
by side; a picture that was seen before; and the hash alone of a picture's bytes, by which it is known again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmserve.assembly import load_processor, resolve_folder
from mmserve.bench.report import json_line, machine, table
from mmserve.config import EngineConfig
from processors import PromptProcessor
from processors.one_thread import use_one_core

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["render", "run"]

_TEXT = "What is in the picture?"


def run(
    model: Path,
    *,
    num_images: int = 16,
    size: tuple[int, int] = (1280, 960),
    repeats: int = 3,
    workers: int | None = None,
) -> dict[str, Any]:
    """Measure.

    Args:
        model: A model folder with a processor and a chat template.
        num_images: Pictures of noise. size: Their (width, height).
        repeats: Times that each figure is taken; the best counts.
        workers: Threads for the pictures of one prompt; None: one a core.

    Returns:
        {"machine", "model", "images", "size", "tokens", "seconds": {...}, "images_per_second": {...}, "overhead",
        "speedup", "speedup_over_one_thread", "repeat_ms", "repeat_ms_beyond_hash"}; `overhead` is
        this layer's time over the bare processor's, minus 1, a picture at a time. `speedup` is side by side (workers
        with torch on one thread each) against one by one (torch on all its threads), `speedup_over_one_thread` against
        one thread in all; all three through this layer.
    """
    folder = resolve_folder(model)
    load_processor(folder, EngineConfig())  # an error of ours if there is none
    pictures = _noise(num_images, size)
    with ExitStack() as stack:

        def layer(**options: Any) -> PromptProcessor:
            return stack.enter_context(closing(PromptProcessor.from_pretrained(folder, **options)))

        layers = _Layers(layer(cache_bytes=0, workers=1), layer(cache_bytes=0, workers=workers), layer())
        tokens = layers.kept.process(_TEXT, pictures[:1]).num_image_tokens
        one_thread = stack.enter_context(ThreadPoolExecutor(1, initializer=use_one_core))
        calls = _calls(_bare_call(folder), layers, pictures, one_thread)
        seconds = {name: min(_time(call) for _ in range(repeats)) for name, call in calls.items()}
    return {
        "machine": machine(),
        "model": str(model),
        "images": num_images,
        "size": list(size),
        "tokens": tokens,
        "seconds": seconds,
        "images_per_second": {name: num_images / value for name, value in seconds.items()},
        "overhead": seconds["layer"] / seconds["bare"] - 1,
        "speedup": seconds["one prompt, one by one"] / seconds["one prompt, side by side"],
        "speedup_over_one_thread": seconds["one prompt, one thread"] / seconds["one prompt, side by side"],
        "repeat_ms": 1000 * seconds["seen before"] / num_images,
        "repeat_ms_beyond_hash": 1000 * (seconds["seen before"] - seconds["hash of as many bytes"]) / num_images,
    }


@dataclass(frozen=True, slots=True)
class _Layers:
    """This layer three times: on one thread, on several, and with a cache that knows the first picture."""

    single: PromptProcessor
    parallel: PromptProcessor
    kept: PromptProcessor


def _noise(count: int, size: tuple[int, int]) -> list[Image]:
    import numpy
    from PIL import Image

    random = numpy.random.default_rng(0)
    return [Image.fromarray(random.integers(0, 256, (size[1], size[0], 3), dtype=numpy.uint8)) for _ in range(count)]


def _bare_call(folder: Path) -> Callable[[Image], object]:
    """The Hugging Face processor's own way from a picture and a text to tensors."""
    from transformers import AutoProcessor

    bare = AutoProcessor.from_pretrained(str(folder))

    def call(picture: Image) -> object:
        content = [{"type": "image", "image": picture}, {"type": "text", "text": _TEXT}]
        return bare.apply_chat_template(
            [{"role": "user", "content": content}],
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            add_generation_prompt=True,
        )

    return call


def _calls(
    bare: Callable[[Image], object], layers: _Layers, pictures: Sequence[Image], one_thread: Executor
) -> dict[str, Callable[[], object]]:
    """What is timed, under the names of the result; each call goes once through all pictures."""
    pixels = pictures[0].tobytes()
    return {
        "bare": lambda: [bare(picture) for picture in pictures],
        "layer": lambda: [layers.parallel.process(_TEXT, [picture]) for picture in pictures],
        "one prompt, one thread": lambda: one_thread.submit(layers.single.process, _TEXT, pictures).result(),
        "one prompt, one by one": lambda: layers.single.process(_TEXT, pictures),
        "one prompt, side by side": lambda: layers.parallel.process(_TEXT, pictures),
        "seen before": lambda: [layers.kept.process(_TEXT, pictures[:1]) for _ in pictures],
        "hash of as many bytes": lambda: [sha256(pixels).digest() for _ in pictures],
    }


def render(result: dict[str, Any]) -> str:
    """The result as a table and one JSON line."""
    rows = [
        (name, f"{1000 * seconds / result['images']:.2f}", f"{result['images_per_second'][name]:.1f}")
        for name, seconds in result["seconds"].items()
    ]
    return table(("what", "ms an image", "images/s"), rows) + "\n\n" + json_line(result)


def _time(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
