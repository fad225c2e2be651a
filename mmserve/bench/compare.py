"""This engine against transformers' generate(): the same model, prompts and tokens, in one process and one run.

Both sides get pictures and text and give token ids, preprocessing included. Machines differ and are shared, so the
ratios of one run are what counts; each figure is the best of `repeats`, with the two sides taking turns.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmserve.bench.report import json_line, machine, save_bars, table

if TYPE_CHECKING:
    from PIL import Image

    from mmserve.pipeline import MMPipeline

__all__ = ["Workload", "render", "run"]


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked.

    Attributes:
        image_size: Width and height of the picture. tokens: To generate. batch: Requests at once.
        text_tokens: Prompt length of the decode rows, about. decode_tokens: Steps that they time.
        repeats: Runs of each figure; the best counts.
    """

    image_size: tuple[int, int] = (512, 384)
    tokens: int = 64
    batch: int = 8
    text_tokens: int = 128
    decode_tokens: int = 96
    repeats: int = 3


QUESTION = "What is shown in this picture?"

ROWS = (
    ("first_token", "first token, new image", "s"),
    ("first_token_warm", "first token, image seen before", "s"),
    ("one_request", "one request", "s"),
    ("many_requests", "{batch} requests at once", "s"),
    ("decode_one", "decode, one sequence", "ms/step"),
    ("decode_many", "decode, {batch} sequences", "ms/step"),
    ("short_text", "16-token text prompt, 16 tokens", "s"),
    ("long_text", "2,000-token text prompt, 1 token", "s"),
)
"""Name of a figure, what it is called, its unit. Lower is better throughout."""


def run(
    model: str | Path,
    *,
    dtype: str = "auto",
    workload: Workload | None = None,
    only: tuple[str, ...] = (),
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure both sides.

    Args:
        model: A model folder. dtype: As in `MMPipeline`.
        workload: What is asked. only: Names of the figures wanted (see ROWS); empty: all.
        say: Called with a line of text as the run goes on.

    Returns:
        {"machine", "model", "dtype", "workload", "transformers": {figure: value}, "mmserve": {figure: value},
        "ratio": {figure: times faster}}
    """
    from mmserve.pipeline import MMPipeline

    work = workload or Workload()
    wanted = [name for name, _, _ in ROWS if not only or name in only]
    theirs: dict[str, float] = {}
    ours: dict[str, float] = {}
    cached = MMPipeline(model, dtype=dtype, progress="off")
    uncached = MMPipeline(model, dtype=dtype, progress="off", enable_prefix_caching=False, encoder_cache_memory=0)
    with closing(cached), closing(uncached):
        chosen = str(cached.describe()["dtype"])
        left, right = _Transformers(Path(model), chosen, work), _Engine(uncached, cached, work)
        gc.collect()
        for name in wanted:
            for _ in range(work.repeats):
                for side, best in ((right, ours), (left, theirs)):
                    value = getattr(side, name)()
                    best[name] = min(value, best.get(name, value))
            say(f"{name}: transformers {theirs[name]:.4g}, mmserve {ours[name]:.4g}")
    return {
        "machine": machine(),
        "model": str(model),
        "dtype": chosen,
        "workload": {name: getattr(work, name) for name in Workload.__slots__},
        "transformers": theirs,
        "mmserve": ours,
        "ratio": {name: theirs[name] / ours[name] for name in wanted},
    }


def render(result: dict[str, Any], plot: Path | None = None) -> str:
    """The result as a table and one JSON line; `plot`: also a PNG of the ratios."""
    batch = result["workload"]["batch"]
    named = [(name, label.format(batch=batch), unit) for name, label, unit in ROWS if name in result["ratio"]]
    rows = [
        (
            f"{label}, {unit}",
            f"{result['transformers'][name]:.3g}",
            f"{result['mmserve'][name]:.3g}",
            f"{result['ratio'][name]:.2f}x",
        )
        for name, label, unit in named
    ]
    if plot is not None:
        title = f"times faster than transformers' generate() ({result['dtype']})"
        values = [result["ratio"][name] for name, _, _ in named]
        save_bars(plot, title, [label for _, label, _ in named], values, "x")
    return table(("", "transformers", "mmserve", "faster"), rows) + "\n" + json_line(result)


def _picture(work: Workload, seed: int) -> Image.Image:
    """A picture that no other seed gives: coarse noise, so that it looks like something to a resampler."""
    import numpy as np
    from PIL import Image

    small = np.random.default_rng(seed).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    return Image.fromarray(small).resize(work.image_size)


def _text(words: int, seed: int) -> str:
    """About `words` tokens: in a byte-level vocabulary without merges a letter and a space are two."""
    return " ".join("abcdefghijklmnopqrstuvwxyz"[(seed + 7 * i) % 26] for i in range(words // 2))


class _Transformers:
    """Figures of the other side; one method a figure, in the unit of ROWS."""

    def __init__(self, model: Path, dtype: str, work: Workload) -> None:
        from transformers import AutoModelForImageTextToText, AutoProcessor

        self._processor = AutoProcessor.from_pretrained(model)
        self._model = AutoModelForImageTextToText.from_pretrained(model, dtype=dtype).eval()
        self._work = work

    def first_token(self) -> float:
        return self._generate([_picture(self._work, 1)], [QUESTION], 1)

    first_token_warm = first_token  # it keeps nothing from one call to the next

    def one_request(self) -> float:
        return self._generate([_picture(self._work, 1)], [QUESTION], self._work.tokens)

    def many_requests(self) -> float:
        count = self._work.batch
        pictures = [_picture(self._work, seed) for seed in range(count)]
        return self._generate(pictures, [QUESTION] * count, self._work.tokens)

    def decode_one(self) -> float:
        return self._decode(1)

    def decode_many(self) -> float:
        return self._decode(self._work.batch)

    def short_text(self) -> float:
        return self._generate([], [_text(16, 0)], 16)

    def long_text(self) -> float:
        return self._generate([], [_text(2000, 0)], 1)

    def _decode(self, count: int) -> float:
        texts = [_text(self._work.text_tokens, 0)] * count
        steps = self._work.decode_tokens
        return 1000 * (self._generate([], texts, steps + 1) - self._generate([], texts, 1)) / steps

    def _generate(self, pictures: list[Image.Image], texts: list[str], tokens: int) -> float:
        """Seconds for one batch, from pictures and text to token ids."""
        began = time.perf_counter()
        conversations = []
        for i, text in enumerate(texts):
            picture = [{"type": "image", "image": pictures[i]}] if pictures else []
            conversations.append([{"role": "user", "content": [*picture, {"type": "text", "text": text}]}])
        inputs = self._processor.apply_chat_template(
            conversations,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True, "padding_side": "left"},
        ).to(self._model.dtype)
        out = self._model.generate(**inputs, do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens)
        spent = time.perf_counter() - began
        assert out.shape[1] == inputs["input_ids"].shape[1] + tokens
        return spent


class _Engine:
    """Figures of this engine; one method a figure, in the unit of ROWS."""

    def __init__(self, uncached: MMPipeline, cached: MMPipeline, work: Workload) -> None:
        self._uncached, self._cached = uncached, cached
        self._work = work

    def first_token(self) -> float:
        return self._ask(self._uncached, [_picture(self._work, 1)], [QUESTION], 1)

    def first_token_warm(self) -> float:
        self._ask(self._cached, [_picture(self._work, 1)], [QUESTION], 1)
        return self._ask(self._cached, [_picture(self._work, 1)], [QUESTION], 1)

    def one_request(self) -> float:
        return self._ask(self._uncached, [_picture(self._work, 1)], [QUESTION], self._work.tokens)

    def many_requests(self) -> float:
        count = self._work.batch
        pictures = [_picture(self._work, seed) for seed in range(count)]
        return self._ask(self._uncached, pictures, [QUESTION] * count, self._work.tokens)

    def decode_one(self) -> float:
        return self._decode(1)

    def decode_many(self) -> float:
        return self._decode(self._work.batch)

    def short_text(self) -> float:
        return self._ask(self._uncached, [], [_text(16, 0)], 16)

    def long_text(self) -> float:
        return self._ask(self._uncached, [], [_text(2000, 0)], 1)

    def _decode(self, count: int) -> float:
        texts = [_text(self._work.text_tokens, 0)] * count
        steps = self._work.decode_tokens
        whole = self._ask(self._uncached, [], texts, steps + 1)
        return 1000 * (whole - self._ask(self._uncached, [], texts, 1)) / steps

    def _ask(self, pipe: MMPipeline, pictures: list[Image.Image], texts: list[str], tokens: int) -> float:
        """Seconds for requests handed in together, from pictures and text to token ids."""
        sampling = {"temperature": 0.0, "max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True}
        began = time.perf_counter()
        requests = [
            {"prompt": text, "images": pictures[i] if pictures else None, "sampling": sampling}
            for i, text in enumerate(texts)
        ]
        outputs = pipe.generate_batch(requests)
        spent = time.perf_counter() - began
        assert all(len(output.token_ids) == tokens for output in outputs)  # type: ignore[union-attr]
        return spent
