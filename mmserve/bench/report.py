"""What a benchmark says: the machine, a table, a plot, one line of JSON."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["json_line", "machine", "save_bars", "table"]


def machine() -> dict[str, Any]:
    """The processor, threads and versions that the figures depend on."""
    import torch
    import transformers

    from mmserve.kernels.library import status

    return {
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "kernels": status().describe(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest entry, the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = []
    for row in (header, *rows):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def json_line(result: Mapping[str, Any]) -> str:
    """The whole result in one line."""
    return json.dumps(result, separators=(",", ":"))


def save_bars(path: Path, title: str, names: Sequence[str], values: Sequence[float], unit: str) -> None:
    """A bar a name, its value beside it, and a line at 1; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 0.6 * len(names) + 1.4))
    bars = axes.barh(range(len(names)), values, color="#3b6ea5")
    axes.bar_label(bars, labels=[f"{value:.1f}{unit}" for value in values], padding=4)
    axes.axvline(1.0, color="#888888", linewidth=1)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.margins(x=0.15)
    axes.set_title(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
