"""Pictures by seed, and tiny processors of real families, made once."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
from PIL import Image

from processors import PromptProcessor

ROOT = Path(__file__).parents[3]


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """RGB noise."""
    values = numpy.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=numpy.uint8)
    return Image.fromarray(values)


@pytest.fixture(scope="session")
def builders() -> object:
    """The module `fixtures.tiny_processors.builders`."""
    sys.path.insert(0, str(ROOT))
    from fixtures.tiny_processors import builders as module

    return module


@pytest.fixture(scope="session")
def processor_of(builders: object) -> Callable[[str], PromptProcessor]:
    """A function: model type -> its tiny `PromptProcessor`, made once a session."""

    @functools.cache
    def make(model_type: str) -> PromptProcessor:
        return PromptProcessor.from_processor(builders.build(model_type))  # type: ignore[attr-defined]

    return make
