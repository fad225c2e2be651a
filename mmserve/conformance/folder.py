"""A user's own model folder as a subject: made-up pictures and questions, through the folder's own processor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mmserve.assembly import load_processor, process_request
from mmserve.config import EngineConfig
from mmserve.conformance.subject import Subject
from mmserve.errors import InputError, UnsupportedModelError
from mmserve.model.checkpoint import open_checkpoint
from mmserve.model.generate_inputs import generate_inputs
from mmserve.model.model_config import read_config, takes_images
from mmserve.types import GenerationRequest, ImageInput
from processors.types import ProcessedPrompt

if TYPE_CHECKING:
    from PIL.Image import Image

    from processors import PromptProcessor

__all__ = ["folder_subject"]

_SIZES = ((224, 224), (320, 192))
"""Of the made-up pictures, width and height."""
_QUESTIONS = ("What is in this picture?", "What differs between these pictures?", "Describe the colours of this.")
_TEXTS = (
    "Name three things that are larger than a house.",
    "Why?",
    "Write a short poem about the sea in the north, and say after it how many lines and how many words it has.",
)


def folder_subject(folder: Path) -> Subject:
    """Prompts for the model in `folder`: one image, another question to it; two of different sizes, and text, if taken.

    Raises:
        ModelLoadError: The folder holds no model, or an image+text model without a processor that can be used.
        InputError: The processor does not take the made-up pictures.
    """
    checkpoint = open_checkpoint(folder)
    config = read_config(checkpoint, False)
    try:
        processor = load_processor(folder, EngineConfig())
    except UnsupportedModelError:
        if takes_images(config):
            raise
        return _text_subject(folder, config)
    if not takes_images(config):
        texts = tuple(_text_prompt(processor, text) for text in _TEXTS)
        return Subject(folder.name, folder, texts, "text", generate_inputs)
    first, second = _picture(0), _picture(1)
    one = _prompt(processor, _QUESTIONS[0], first)
    two = _if_taken(lambda: _prompt(processor, _QUESTIONS[1], second, first))
    text = _if_taken(lambda: _text_prompt(processor, _TEXTS[0]))
    prompts = (one, *two, _prompt(processor, _QUESTIONS[2], first), *text)
    compared = (["text"] if text else []) + ["one image"] + (["two images of different sizes"] if two else [])
    return Subject(folder.name, folder, prompts, ", ".join(compared), generate_inputs)


def _if_taken(make: Callable[[], ProcessedPrompt]) -> tuple[ProcessedPrompt, ...]:
    """A prompt; none for a family that takes no such prompt, which the report then does not claim."""
    try:
        return (make(),)
    except InputError:
        return ()


def _prompt(processor: PromptProcessor, question: str, *pictures: Image) -> ProcessedPrompt:
    images = tuple(ImageInput(source=picture) for picture in pictures)
    return process_request(processor, GenerationRequest(prompt=question, images=images))


def _text_prompt(processor: PromptProcessor, text: str) -> ProcessedPrompt:
    return process_request(processor, GenerationRequest(prompt=text))


def _text_subject(folder: Path, config: Any) -> Subject:
    """A language model that comes without a tokenizer: random ids from the lower half of its vocabulary."""
    generator = torch.Generator().manual_seed(0)
    most = max(20, config.get_text_config().vocab_size // 2)
    prompts = tuple(
        ProcessedPrompt(token_ids=tuple(torch.randint(10, most, (length,), generator=generator).tolist()))
        for length in (9, 5, 30)
    )
    return Subject(folder.name, folder, prompts, "text", generate_inputs)


def _picture(seed: int) -> Image:
    """Smooth colours with coarse noise: nothing that a preprocessor flattens, the same on every machine."""
    from PIL import Image

    width, height = _SIZES[seed]
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
