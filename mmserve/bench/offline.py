"""Requests per second and time to first token: one picture and one question a request, some at once, cold and warm.

Cold: pictures that this pipeline has never seen. Warm: another question about the same pictures, so that their rows and
the blocks of the prompt up to the question come from the caches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmserve.bench.report import json_line, machine, table

if TYPE_CHECKING:
    from PIL import Image

    from mmserve.pipeline import MMPipeline

__all__ = ["Workload", "render", "run"]

QUESTIONS = ("What is shown in this picture?", "Which colors are in it?")
"""Asked of pictures not seen before, and then again of the same pictures."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked.

    Attributes:
        image_size: Width and height of each picture. tokens: To generate, a request.
        at_once: Requests handed in together, a case each. repeats: Runs of each case; the one with most requests a
            second counts.
    """

    image_size: tuple[int, int] = (512, 384)
    tokens: int = 32
    at_once: tuple[int, ...] = (1, 8, 32)
    repeats: int = 2


def run(
    model: str | Path | None = None,
    *,
    dtype: str = "auto",
    device: str = "auto",
    workload: Workload | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure.

    Args:
        model: A model folder or hub id; None: the demo model. dtype, device: As in `MMPipeline`.
        workload: What is asked.
        say: Called with a line of text as the run goes on.

    Returns:
        {"machine", "model", "dtype", "workload", "cases": [{"at_once", "cache": "cold" or "warm",
        "requests_per_second", "first_token_s" (mean), "first_token_worst_s", "cached_tokens" (share of the prompts)}]}
    """
    from mmserve.pipeline import MMPipeline

    work = workload or Workload()
    cases = []
    most = max(work.at_once)
    with closing(MMPipeline(model, dtype=dtype, device=device, max_num_seqs=most, progress="off")) as pipe:
        about = pipe.describe()
        _ask(pipe, _pictures(work, 1, first=0), QUESTIONS[0], 2)  # whatever is done once, before the clock starts
        seen = 1
        for count in work.at_once:
            cold: list[dict[str, Any]] = []
            warm: list[dict[str, Any]] = []
            for _ in range(work.repeats):
                pictures = _pictures(work, count, first=seen)
                seen += count
                cold.append(_ask(pipe, pictures, QUESTIONS[0], work.tokens))
                warm.append(_ask(pipe, pictures, QUESTIONS[1], work.tokens))
            for name, runs in (("cold", cold), ("warm", warm)):
                best = max(runs, key=lambda figures: float(figures["requests_per_second"]))
                cases.append({"at_once": count, "cache": name, **best})
                say(f"{count} at once, {name}: {best['requests_per_second']:.3g} requests a second")
    return {
        "machine": machine(),
        "model": about["folder"],
        "dtype": about["dtype"],
        "workload": asdict(work),
        "cases": cases,
    }


def render(result: dict[str, Any]) -> str:
    """The result as a table and one JSON line."""
    rows = [
        (
            f"{case['at_once']} at once, {case['cache']}",
            f"{case['requests_per_second']:.3g}",
            f"{case['first_token_s']:.3g}",
            f"{case['first_token_worst_s']:.3g}",
            f"{case['cached_tokens']:.0%}",
        )
        for case in result["cases"]
    ]
    header = ("", "requests/s", "first token, s", "worst, s", "prompt from cache")
    return table(header, rows) + "\n" + json_line(result)


def _pictures(work: Workload, count: int, first: int) -> list[Image.Image]:
    """Pictures that no other number gives: coarse noise, so that it looks like something to a resampler."""
    import numpy as np
    from PIL import Image

    grids = (np.random.default_rng(first + i).integers(0, 256, (24, 32, 3), dtype=np.uint8) for i in range(count))
    return [Image.fromarray(grid).resize(work.image_size) for grid in grids]


def _ask(pipe: MMPipeline, pictures: Sequence[Image.Image], question: str, tokens: int) -> dict[str, Any]:
    """One question about each picture, all at once."""
    sampling = {"temperature": 0.0, "max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True}
    requests = [{"prompt": question, "images": picture, "sampling": sampling} for picture in pictures]
    began = time.perf_counter()
    outputs = pipe.generate_batch(requests)
    spent = time.perf_counter() - began
    first = [output.metrics.first_token for output in outputs]  # type: ignore[union-attr]
    usages = [output.usage for output in outputs]  # type: ignore[union-attr]
    return {
        "requests_per_second": len(requests) / spent,
        "first_token_s": sum(first) / len(first),
        "first_token_worst_s": max(first),
        "cached_tokens": sum(u.cached_tokens for u in usages) / sum(u.prompt_tokens for u in usages),
    }
