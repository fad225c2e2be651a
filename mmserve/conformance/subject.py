"""What is compared: a model folder, prompts for it, and how the plain model's `generate()` takes each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from processors.types import ProcessedPrompt

__all__ = ["GenerateInputs", "Subject"]

GenerateInputs = Callable[[Any, ProcessedPrompt], Mapping[str, Any]]
"""From a plain transformers model and a prompt to the keyword arguments of its `generate()`."""


@dataclass(frozen=True, slots=True)
class Subject:
    """One model to compare.

    Attributes:
        name: What the report calls it. folder: What `save_pretrained()` wrote.
        prompts: Run together in every batch.
        compared: In words, what the prompts hold: "text, one image, two images of different sizes".
        inputs: How the plain model takes them.
    """

    name: str
    folder: Path
    prompts: tuple[ProcessedPrompt, ...]
    compared: str
    inputs: GenerateInputs
