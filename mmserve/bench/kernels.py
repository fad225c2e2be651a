"""The kernels one by one against torch's own, in processor time of one thread: usable on a busy machine too.

python -m mmserve.bench.kernels
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from mmserve.bench.report import json_line, machine, table
from mmserve.kernels.library import kernels

__all__ = ["render", "run"]

_REPEATS = 7


def run() -> dict[str, Any]:
    """{"machine", "rows": [{"what", "torch": ms, "mmserve": ms}, ...]}; sets torch to one thread meanwhile."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            rows = [
                {"what": what, "torch": 1000 * _best(theirs), "mmserve": 1000 * _best(ours)}
                for what, theirs, ours in _cases()
            ]
        return {"machine": machine(), "rows": rows}
    finally:
        torch.set_num_threads(threads)


def render(result: dict[str, Any]) -> str:
    """A table and one JSON line."""
    rows = [
        (row["what"], f"{row['torch']:.2f}", f"{row['mmserve']:.2f}", f"{row['torch'] / row['mmserve']:.2f}x")
        for row in result["rows"]
    ]
    return table(("ms of one thread's processor time", "torch", "mmserve", "faster"), rows) + "\n" + json_line(result)


def _cases() -> Iterator[tuple[str, Callable[[], object], Callable[[], object]]]:
    library = kernels()
    for dtype, heads, size in (
        (torch.bfloat16, 12, 64),
        (torch.bfloat16, 16, 72),
        (torch.bfloat16, 16, 80),
        (torch.float32, 12, 64),
    ):
        q, k, v = (torch.randn(1, 1024, heads, size).to(dtype).transpose(1, 2) for _ in range(3))
        yield (
            f"tower attention, 1024 patches, {heads} x {size}, {_name(dtype)}",
            partial(F.scaled_dot_product_attention, q, k, v),
            partial(library.full_attention, q, k, v, size**-0.5),
        )
    x = torch.randn(1024, 3072).bfloat16()
    yield "GELU, 1024 x 3072, bfloat16", lambda: F.gelu(x, approximate="tanh"), lambda: library.gelu_tanh_(x)
    for dtype in (torch.bfloat16, torch.float32):
        # More weights than any cache holds: 30 of 3.5 MB in bfloat16, as the layers of a decoder.
        weights = [torch.randn(3072, 576).to(dtype) for _ in range(30)]
        for rows in (1, 8, 16):
            y = torch.randn(rows, 576).to(dtype)
            yield (
                f"30 products of {rows} rows, 3072 x 576, {_name(dtype)}",
                partial(_each, lambda y, weight: F.linear(y, weight), y, weights),
                partial(_each, lambda y, weight: library.linear(y, weight, None, None), y, weights),
            )


def _each(
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], y: torch.Tensor, weights: list[torch.Tensor]
) -> None:
    for weight in weights:
        product(y, weight)


def _best(call: Callable[[], object]) -> float:
    """Seconds of processor time of the fastest run."""
    call()
    best = float("inf")
    for _ in range(_REPEATS):
        began = time.process_time()
        call()
        best = min(best, time.process_time() - began)
    return best


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    print(render(run()))  # noqa: T201  the command's own output
