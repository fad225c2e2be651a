"""The memory that answering takes: a pipeline's peak against its weights and the cache that was asked for.

In a process of its own, which loads the demo model and asks it first, so that libraries, threads and compiled kernels
are there. Then the high-water mark of resident memory is reset, a pipeline is made that keeps no picture and no image
rows for later, and requests with a new picture each are asked at once. The mark counts what the process held at most,
less what it held before.

    python -m mmserve.bench.memory FOLDER DTYPE REQUESTS TOKENS CACHE_BYTES      prints one line of JSON
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmserve.bench.apart import MiB, measure_apart, say_result, start_measuring
from mmserve.bench.report import json_line, table
from mmserve.engine.resident import resident

if TYPE_CHECKING:
    from mmserve.pipeline import MMPipeline

__all__ = ["Workload", "render", "run"]

_PICTURE = (512, 384)


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked.

    Attributes:
        requests: At once, a new picture of 512 x 384 each. tokens: To generate, each.
        cache: Bytes for keys and values.
    """

    requests: int = 8
    tokens: int = 16
    cache: int = 256 * MiB


def run(model: Path, *, dtype: str = "auto", workload: Workload | None = None) -> dict[str, Any]:
    """Ask `model` in a process of its own.

    Returns:
        {"model", "dtype", "requests", in MiB "weights", "cache", "loaded", "peak", and "ratio"}: `loaded` and `peak`
        are what the pipeline added to the process once it stood and at most, `ratio` is peak over weights and cache.

    Raises:
        MMServeError: The system is not Linux, or the model can not be asked; says why.
    """
    work = workload or Workload()
    arguments = [str(model), dtype, str(work.requests), str(work.tokens), str(work.cache)]
    return measure_apart("mmserve.bench.memory", arguments, f"{model} could not be asked")


def render(result: Mapping[str, Any]) -> str:
    """A table, and one line of JSON."""
    rows = [[name, f"{result[name]:,.0f} MiB"] for name in ("weights", "cache", "loaded", "peak")]
    rows.append(["peak over weights and cache", f"{result['ratio']:.2f}"])
    header = [f"{result['requests']} requests", result["dtype"]]
    return f"{table(header, rows)}\n\n{json_line(result)}"


def _measure(model: Path, dtype: str, work: Workload) -> dict[str, Any]:
    from mmserve.demo import demo_model_folder

    with closing(_pipeline(demo_model_folder(), "auto", work.cache)) as pipe:
        _ask(pipe, 1, work.tokens)
    del pipe
    before = start_measuring()
    with closing(_pipeline(model, dtype, work.cache)) as pipe:
        loaded = resident().now - before
        _ask(pipe, work.requests, work.tokens)
        peak = resident().peak - before
        about = pipe.describe()
    weights = about["weight_bytes"]
    return {
        "model": str(model),
        "dtype": about["dtype"],
        "requests": work.requests,
        "weights": weights / MiB,
        "cache": work.cache / MiB,
        "loaded": loaded / MiB,
        "peak": peak / MiB,
        "ratio": peak / (weights + work.cache),
    }


def _pipeline(model: Path, dtype: str, cache: int) -> MMPipeline:
    from mmserve.pipeline import MMPipeline

    return MMPipeline(
        model,
        dtype=dtype,
        progress="off",
        kv_cache_memory=cache,
        encoder_cache_memory=0,
        processor_cache_memory=0,
    )


def _ask(pipe: MMPipeline, count: int, tokens: int) -> None:
    import numpy as np

    random = np.random.default_rng(0)
    shape = (_PICTURE[1], _PICTURE[0], 3)
    sampling = {"temperature": 0.0, "max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True}
    pipe.generate_batch(
        [
            {"prompt": "What is shown?", "images": random.integers(0, 256, shape, dtype=np.uint8), "sampling": sampling}
            for _ in range(count)
        ]
    )


def _main() -> int:
    folder, dtype, requests, tokens, cache = sys.argv[1:]
    return say_result(lambda: _measure(Path(folder), dtype, Workload(int(requests), int(tokens), int(cache))))


if __name__ == "__main__":
    sys.exit(_main())
