"""What several ranks cost and give: bytes sent, host time of a step's exchange, and prefill against one process.

Prefill: `ranks` ranks of one thread each against one process of `ranks` threads, on the same prompts of text. The
sides take turns, each in a process of its own that waits while the other runs, and the best turn of each counts.

    python -m mmserve.bench.parallel FOLDER DTYPE RANKS TEXT_TOKENS AT_ONCE      one side, started by `run`
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmserve.bench.report import json_line, machine, table
from mmserve.errors import MMServeError
from mmserve.parallel.workers.crew import child_environment

if TYPE_CHECKING:
    from mmserve.pipeline import MMPipeline

__all__ = ["Workload", "render", "run"]


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked.

    Attributes:
        ranks: That share the model; one process with as many threads is the other side.
        text_tokens: Of a prompt, about. at_once: Prompts handed in together. repeats: Turns of each side.
        sequences: Decoding in the exchanged steps. steps: Of them.
        counted_tokens: Of the prompt whose bytes are counted.
    """

    ranks: int = 2
    text_tokens: int = 1000
    at_once: int = 2
    repeats: int = 5
    sequences: int = 32
    steps: int = 200
    counted_tokens: int = 128


def run(
    model: Path,
    *,
    dtype: str = "auto",
    workload: Workload | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure, on the CPU.

    Args:
        model: A model folder. dtype: As in `MMPipeline`.
        workload: What is asked.
        say: Called with a line of text as the run goes on.

    Returns:
        {"machine", "model", "dtype", "workload", "exchange" (see `mmserve.bench.exchange`), "traffic": [one a layout,
        see `mmserve.bench.traffic`], "prefill": {"one_process", "ranks": tokens a second, "ratio": the latter over the
        former}}
    """
    from mmserve.bench.exchange import run as exchange
    from mmserve.bench.traffic import count_traffic
    from mmserve.parallel.layout import Layout

    work = workload or Workload()
    exchanged = exchange(work.sequences, work.steps)
    say(f"exchange of a step, {work.sequences} sequences: {exchanged['median_ms']} ms")
    traffic = []
    for layout in (Layout(work.ranks, 1), Layout(1, work.ranks)):
        traffic.append(count_traffic(model, layout, dtype=dtype, num_tokens=work.counted_tokens))
        say(f"{layout}: {traffic[-1]['bytes_per_token']:,.0f} bytes a token")
    return {
        "machine": machine(),
        "model": str(model),
        "dtype": dtype,
        "workload": asdict(work),
        "exchange": exchanged,
        "traffic": traffic,
        "prefill": _prefill(model, dtype, work, say),
    }


def render(result: dict[str, Any]) -> str:
    """The result as tables and one JSON line."""
    exchanged, prefill, work = result["exchange"], result["prefill"], result["workload"]
    rows = [
        (
            f"tensor {entry['tensor_parallel']} x pipeline {entry['pipeline_parallel']}",
            *(f"{entry[name]:,.0f}" for name in ("bytes_per_token", "bytes_per_token_on_paper")),
            *(f"{entry[name]:,.0f}" for name in ("bytes_per_answer", "bytes_per_answer_on_paper")),
        )
        for entry in result["traffic"]
    ]
    sent = table(("sent by rank 0, bytes", "a token", "on paper", "an answer", "on paper"), rows)
    figures = table(
        ("", ""),
        [
            (f"exchange of a step, {exchanged['num_seqs']} sequences, median", f"{exchanged['median_ms']:.2f} ms"),
            ("the same, processor time of the driver", f"{exchanged['driver_cpu_ms']:.2f} ms"),
            ("the same, 90 % are below", f"{exchanged['p90_ms']:.2f} ms"),
            (f"prefill, one process, {work['ranks']} threads", f"{prefill['one_process']:,.0f} tokens/s"),
            (f"prefill, {work['ranks']} ranks, one thread each", f"{prefill['ranks']:,.0f} tokens/s"),
            ("ranks over one process", f"{prefill['ratio']:.0%}"),
        ],
    )
    return f"{sent}\n\n{figures}\n{json_line(result)}"


def _prefill(model: Path, dtype: str, work: Workload, say: Callable[[str], None]) -> dict[str, Any]:
    sides = {"one_process": 1, "ranks": work.ranks}
    best: dict[str, float] = {}
    started: dict[str, _Side] = {}
    try:
        for name, ranks in sides.items():
            started[name] = _Side(model, dtype, work, ranks)
        for _ in range(work.repeats):
            for name, side in started.items():
                best[name] = max(side.turn(), best.get(name, 0.0))
    finally:
        for side in started.values():
            side.close()
    say(
        f"prefill, tokens a second: {best['ranks']:,.0f} over {work.ranks} ranks, "
        f"{best['one_process']:,.0f} in one process"
    )
    return {**best, "ratio": best["ranks"] / best["one_process"]}


class _Side:
    """A process with a pipeline over `ranks` ranks, that works when it is told to."""

    def __init__(self, model: Path, dtype: str, work: Workload, ranks: int) -> None:
        threads = {"OMP_NUM_THREADS": str(work.ranks // ranks)}
        numbers = (ranks, work.text_tokens, work.at_once)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mmserve.bench.parallel", str(model), dtype, *map(str, numbers)],
            env={**child_environment(), **threads},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def turn(self) -> float:
        """Tokens a second.

        Raises:
            MMServeError: The process has ended; what it said is on the standard error.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
            said = self._process.stdout.readline()
        except OSError:
            said = ""
        if not said:
            raise MMServeError(f"a side of the benchmark ended with status {self._process.wait()}")
        return float(json.loads(said))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        with self._process:
            self._process.stdin.close()


def _main(arguments: Sequence[str]) -> int:
    from mmserve.pipeline import MMPipeline

    folder, dtype = arguments[:2]
    ranks, text_tokens, at_once = map(int, arguments[2:])
    prompts = [
        " ".join("abcdefghijklmnopqrstuvwxyz"[(j + 7 * i) % 26] for i in range(text_tokens // 2))
        for j in range(at_once)
    ]
    options: dict[str, Any] = {"enable_prefix_caching": False, "progress": "off", "tensor_parallel": ranks}
    with closing(MMPipeline(folder, dtype=dtype, device="cpu", **options)) as pipe:
        _turn(pipe, prompts)  # whatever is done once, before the clock starts
        for _ in sys.stdin:
            print(_turn(pipe, prompts), flush=True)  # noqa: T201
    return 0


def _turn(pipe: MMPipeline, prompts: Sequence[str]) -> float:
    """Tokens a second: of prompts handed in together, a token each."""
    sampling = {"temperature": 0.0, "max_tokens": 1, "min_tokens": 1, "ignore_eos": True}
    began = time.perf_counter()
    outputs = pipe.generate_batch([{"prompt": prompt, "sampling": sampling} for prompt in prompts])
    spent = time.perf_counter() - began
    return float(sum(output.usage.prompt_tokens for output in outputs) / spent)  # type: ignore[union-attr,misc]


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
