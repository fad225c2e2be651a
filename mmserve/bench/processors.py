"""The processor layer against the bare Hugging Face processor, on the same pictures.

Five figures: the bare processor's own chat call, one picture after the other; this layer doing the same, nothing kept;
this layer with all pictures in one prompt, on one thread and side by side; and a picture that was seen before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mmserve.assembly import load_processor, resolve_folder
from mmserve.bench.report import json_line, machine, table
from mmserve.config import EngineConfig
from processors import PromptProcessor

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
        "speedup", "repeat_ms"}; `overhead` is this layer's time over the bare processor's, minus 1, a picture at a
        time; `speedup` is side by side against one after the other, both through this layer.
    """
    import numpy
    from PIL import Image
    from transformers import AutoProcessor

    folder = resolve_folder(model)
    load_processor(folder, EngineConfig())  # an error of ours if there is none

    random = numpy.random.default_rng(0)
    shape = (size[1], size[0], 3)
    pictures = [Image.fromarray(random.integers(0, 256, shape, dtype=numpy.uint8)) for _ in range(num_images)]
    bare = AutoProcessor.from_pretrained(str(folder))
    single = PromptProcessor.from_pretrained(folder, cache_bytes=0, workers=1)
    parallel = PromptProcessor.from_pretrained(folder, cache_bytes=0, workers=workers)
    kept = PromptProcessor.from_pretrained(folder)
    tokens = single.process(_TEXT, pictures[:1]).num_image_tokens
    kept.process(_TEXT, pictures[:1])

    def bare_call(picture: Image.Image) -> object:
        content = [{"type": "image", "image": picture}, {"type": "text", "text": _TEXT}]
        return bare.apply_chat_template(
            [{"role": "user", "content": content}],
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            add_generation_prompt=True,
        )

    one_by_one: Sequence[tuple[str, Callable[[], object]]] = (
        ("bare", lambda: [bare_call(picture) for picture in pictures]),
        ("layer", lambda: [parallel.process(_TEXT, [picture]) for picture in pictures]),
        ("one prompt, one thread", lambda: single.process(_TEXT, pictures)),
        ("one prompt, side by side", lambda: parallel.process(_TEXT, pictures)),
        ("seen before", lambda: [kept.process(_TEXT, pictures[:1]) for _ in pictures]),
    )
    seconds = {name: min(_time(call) for _ in range(repeats)) for name, call in one_by_one}
    parallel.close()
    return {
        "machine": machine(),
        "model": str(model),
        "images": num_images,
        "size": list(size),
        "tokens": tokens,
        "seconds": seconds,
        "images_per_second": {name: num_images / value for name, value in seconds.items()},
        "overhead": seconds["layer"] / seconds["bare"] - 1,
        "speedup": seconds["one prompt, one thread"] / seconds["one prompt, side by side"],
        "repeat_ms": 1000 * seconds["seen before"] / num_images,
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
