"""Tiny processors of real families, made once."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import pytest
from pictures import ROOT

from processors import PromptProcessor


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
