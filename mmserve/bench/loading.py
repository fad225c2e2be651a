"""The memory that loading a model takes: its peak against the model's own size.

In a process of its own, which loads the demo model first, so that libraries, threads and compiled kernels are there.
Then the kernel's high-water mark of resident memory (VmHWM) is reset, the model is loaded, and the mark is read
again. It counts every page that was resident at once: allocated ones, and mapped ones of files.

    python -m mmserve.bench.loading FOLDER DTYPE      prints one line of JSON
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from mmserve.bench.report import json_line, table
from mmserve.errors import MMServeError

__all__ = ["render", "run"]

_STATUS: Final = Path("/proc/self/status")
_RESET: Final = Path("/proc/self/clear_refs")
_MiB: Final = 2**20


def run(model: Path, *, dtype: str = "auto") -> dict[str, Any]:
    """Load `model` in a process of its own.

    Returns:
        {"model", "dtype", "path", "seconds", in MiB "model_size", "largest_tensor", "peak", "kept", and "ratio"}:
        `peak` and `kept` are what loading added to the process at most and in the end, `ratio` is peak over model_size.

    Raises:
        MMServeError: The system is not Linux, or the model can not be loaded; says why.
    """
    if not _STATUS.is_file() or not _RESET.is_file():
        raise MMServeError("the peak of memory is read from Linux' /proc, which is not here")
    command = [sys.executable, "-m", "mmserve.bench.loading", str(model), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise MMServeError(f"{model} could not be loaded: {(done.stderr.strip().splitlines() or ['no reason'])[-1]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


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
    gc.collect()
    before = _resident()["VmRSS"]
    _RESET.write_text("5", encoding="ascii")
    started = time.perf_counter()
    loaded = load_model(model, block_size=16, device="cpu", dtype=dtype)
    seconds = time.perf_counter() - started
    after = _resident()
    about = loaded.describe()
    total, largest = _sizes(loaded)
    peak = after["VmHWM"] - before
    return {
        "model": str(model),
        "dtype": about["dtype"],
        "path": about["path"],
        "seconds": seconds,
        "model_size": total / _MiB,
        "largest_tensor": largest / _MiB,
        "peak": peak / _MiB,
        "kept": (after["VmRSS"] - before) / _MiB,
        "ratio": peak / total,
    }


def _sizes(loaded: Any) -> tuple[int, int]:
    """Bytes of all parameters, and of the largest."""
    sizes = [parameter.numel() * parameter.element_size() for parameter in loaded._model.parameters()]
    return sum(sizes), max(sizes)


def _resident() -> dict[str, int]:
    """Bytes resident now (VmRSS) and at most since the last reset (VmHWM)."""
    lines = dict(line.split(":", 1) for line in _STATUS.read_text(encoding="ascii").splitlines())
    return {name: int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM")}


def _main() -> int:
    import torch

    torch.set_num_threads(1)
    try:
        result = _measure(Path(sys.argv[1]), sys.argv[2])
    except MMServeError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1
    print(json_line(result))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(_main())
