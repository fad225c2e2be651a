"""The memory that loading a model takes: its peak against the model's own size.

In a process of its own, which loads the demo model first, so that libraries, threads and compiled kernels are there.
Then the kernel's high-water mark of resident memory (VmHWM) is reset, the model is loaded, and the mark is read
again. It counts every page that was resident at once: allocated ones, and mapped ones of files.

    python -m mmserve.bench.loading FOLDER DTYPE      prints one line of JSON
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmserve.bench.apart import MiB, measure_apart, say_result, start_measuring
from mmserve.bench.report import json_line, table
from mmserve.engine.resident import resident

__all__ = ["render", "run"]


def run(model: Path, *, dtype: str = "auto") -> dict[str, Any]:
    """Load `model` in a process of its own.

    Returns:
        {"model", "dtype", "path", "seconds", in MiB "model_size", "largest_tensor", "peak", "kept", and "ratio"}:
        `peak` and `kept` are what loading added to the process at most and in the end, `ratio` is peak over model_size.

    Raises:
        MMServeError: The system is not Linux, or the model can not be loaded; says why.
    """
    return measure_apart("mmserve.bench.loading", [str(model), dtype], f"{model} could not be loaded")


def render(result: Mapping[str, Any]) -> str:
    """A table, and one line of JSON."""
    rows = [
        [name.replace("_", " "), f"{result[name]:,.0f} MiB"]
        for name in ("model_size", "largest_tensor", "peak", "kept")
    ]
    rows.append(["peak over model size", f"{result['ratio']:.2f}"])
    return f"{table(['loading', result['dtype']], rows)}\n\n{json_line(result)}"


def _measure(model: Path, dtype: str) -> dict[str, Any]:
    from mmserve.demo import demo_model_folder
    from mmserve.model import load_model

    load_model(demo_model_folder(), block_size=16, device="cpu", dtype=dtype)
    before = start_measuring()
    started = time.perf_counter()
    loaded = load_model(model, block_size=16, device="cpu", dtype=dtype)
    seconds = time.perf_counter() - started
    after = resident()
    about = loaded.describe()
    total, largest = _sizes(loaded)
    peak = after.peak - before
    return {
        "model": str(model),
        "dtype": about["dtype"],
        "path": about["path"],
        "seconds": seconds,
        "model_size": total / MiB,
        "largest_tensor": largest / MiB,
        "peak": peak / MiB,
        "kept": (after.now - before) / MiB,
        "ratio": peak / total,
    }


def _sizes(loaded: Any) -> tuple[int, int]:
    """Bytes of all parameters, and of the largest."""
    sizes = [parameter.numel() * parameter.element_size() for parameter in loaded._model.parameters()]
    return sum(sizes), max(sizes)


def _main() -> int:
    import torch

    torch.set_num_threads(1)
    return say_result(lambda: _measure(Path(sys.argv[1]), sys.argv[2]))


if __name__ == "__main__":
    sys.exit(_main())
