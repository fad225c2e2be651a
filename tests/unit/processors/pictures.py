"""Pictures by seed."""

from __future__ import annotations

from pathlib import Path

import numpy
from PIL import Image

ROOT = Path(__file__).parents[3]


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """RGB noise."""
    values = numpy.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=numpy.uint8)
    return Image.fromarray(values)
