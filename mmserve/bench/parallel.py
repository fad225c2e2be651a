"""What several ranks cost and give: bytes sent, host time of a step's exchange, prefill and towers against one process.

`ranks` ranks of one thread each against one process of `ranks` threads, and of one. Prefill: prompts of text, one after
the other, so that each is a step by itself. Encoding: new pictures in one prompt, each in one tile where the processor
can be told so; the clock runs in the tower alone. Sides take turns, each in a process of its own that waits while
others run; medians are compared.

    python -m mmserve.bench.parallel FOLDER DTYPE RANKS TEXT_TOKENS      one side, started by `run`
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmserve.bench.report import json_line, machine, table
from mmserve.errors import MMServeError
from mmserve.parallel.workers.crew import child_environment

if TYPE_CHECKING:
    from mmserve.pipeline import MMPipeline

__all__ = ["Workload", "render", "run"]

_ONE_TOKEN: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1, "min_tokens": 1, "ignore_eos": True}
_PICTURE = (512, 512)
_PROCESSOR_CONFIGS = ("processor_config.json", "preprocessor_config.json")


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked.

    Attributes:
        ranks: That share the model; one process with as many threads is the other side.
        text_tokens: Of a prompt, about. prompts: Of a turn. repeats: Turns of each side.
        pictures: Of a turn of encoding. encodings: Turns of each side.
        sequences: Decoding in the exchanged steps. steps: Of them.
        counted_tokens: Of the prompt whose bytes are counted.
    """

    ranks: int = 2
    text_tokens: int = 1000
    prompts: int = 2
    repeats: int = 5
    pictures: int = 8
    encodings: int = 3
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
        see `mmserve.bench.traffic`], "prefill": tokens a second, and "encoding": pictures a second, of "ranks",
        "one_process" and "one_thread", with "ratio" of the first to the second, and "over_one_thread" to the third}
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
        **_take_turns(model, dtype, work, say),
    }


def render(result: dict[str, Any]) -> str:
    """The result as tables and one JSON line."""
    exchanged, work = result["exchange"], result["workload"]
    rows: list[tuple[str, ...]] = [
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
        ],
    )
    rows = [
        (
            name,
            *(f"{found[side]:,.{digits}f}" for side in ("ranks", "one_process", "one_thread")),
            f"{found['ratio']:.0%}",
            f"{found['over_one_thread']:.2f}x",
        )
        for name, found, digits in (
            ("prefill, tokens/s", result["prefill"], 0),
            ("encoding, pictures/s", result["encoding"], 2),
        )
    ]
    count = work["ranks"]
    sides = table(
        ("", f"{count} ranks", f"1 process, {count} threads", "1 thread", "over process", "over thread"), rows
    )
    return f"{sent}\n\n{figures}\n\n{sides}\n{json_line(result)}"


def _take_turns(model: Path, dtype: str, work: Workload, say: Callable[[str], None]) -> dict[str, dict[str, float]]:
    """What `run` gives of prefill and encoding."""
    sides = {"ranks": (work.ranks, 1), "one_process": (1, work.ranks), "one_thread": (1, 1)}
    started: dict[str, _Side] = {}
    found = {}
    try:
        for name, (ranks, threads) in sides.items():
            started[name] = _Side(model, dtype, work, ranks, threads)
        for what, amount, repeats in (
            ("prefill", work.prompts, work.repeats),
            ("encoding", work.pictures, work.encodings),
        ):
            turns: dict[str, list[float]] = {name: [] for name in sides}
            for _ in range(repeats):
                for name, side in started.items():
                    turns[name].append(side.turn(what, amount))
            rates = {name: statistics.median(rate) for name, rate in turns.items()}
            ratios = {"ratio": rates["ranks"] / rates["one_process"]}
            ratios["over_one_thread"] = rates["ranks"] / rates["one_thread"]
            found[what] = {**rates, **ratios}
            say(f"{what}: {work.ranks} ranks at {ratios['ratio']:.0%} of one process of {work.ranks} threads")
    finally:
        for side in started.values():
            side.close()
    return found


class _Side:
    """A process with a pipeline over `ranks` ranks of `threads` threads, that works when it is told to."""

    def __init__(self, model: Path, dtype: str, work: Workload, ranks: int, threads: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mmserve.bench.parallel", str(model), dtype, str(ranks), str(work.text_tokens)],
            env={**child_environment(), "OMP_NUM_THREADS": str(threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def turn(self, what: str, amount: int) -> float:
        """Tokens a second of "prefill" of `amount` prompts, or pictures a second of "encoding" of as many.

        Raises:
            MMServeError: The process has ended; what it said is on the standard error.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{what} {amount}\n")
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

    folder, dtype = Path(arguments[0]), arguments[1]
    ranks, text_tokens = map(int, arguments[2:])
    options: dict[str, Any] = {"enable_prefix_caching": False, "progress": "off", "tensor_parallel": ranks}
    with closing(MMPipeline(str(folder), dtype=dtype, device="cpu", **options)) as pipe:
        kinds: dict[str, Callable[[int], float]] = {
            "prefill": lambda amount: _prefill(pipe, amount, text_tokens),
            "encoding": _encoder(pipe, folder),
        }
        for run_once in kinds.values():  # whatever is done once, before the clock starts
            run_once(1)
        for line in sys.stdin:
            what, amount = line.split()
            print(kinds[what](int(amount)), flush=True)  # noqa: T201
    return 0


def _prefill(pipe: MMPipeline, prompts: int, text_tokens: int) -> float:
    """Tokens a second: of prompts one after the other, a token each."""
    tokens, seconds = 0, 0.0
    for j in range(prompts):
        prompt = " ".join("abcdefghijklmnopqrstuvwxyz"[(j + 7 * i) % 26] for i in range(text_tokens // 2))
        began = time.perf_counter()
        output = pipe.generate(None, prompt, **_ONE_TOKEN)
        seconds += time.perf_counter() - began
        tokens += output.usage.prompt_tokens
    return tokens / seconds


def _encoder(pipe: MMPipeline, folder: Path) -> Callable[[int], float]:
    """Pictures a second, of so many new ones in one prompt, in the tower alone."""
    random = np.random.default_rng(0)
    options = {"do_image_splitting": False} if _can_split(folder) else {}

    def encode(pictures: int) -> float:
        new = [random.integers(0, 256, (*_PICTURE, 3), dtype=np.uint8) for _ in range(pictures)]
        output = pipe.generate(new, "What is shown?", processor_options=options, **_ONE_TOKEN)
        return pictures / output.metrics.encode

    return encode


def _can_split(folder: Path) -> bool:
    """Whether the model's processor cuts a picture into tiles, unless it is told not to."""
    configs = [path for path in map(folder.joinpath, _PROCESSOR_CONFIGS) if path.is_file()]
    return any('"do_image_splitting"' in path.read_text(encoding="utf-8") for path in configs)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
