"""The form of a family's entry."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from processors.chat import Segment

__all__ = ["Family"]

Layout = Callable[[Any, Sequence[Segment]], list[Segment]]
"""(processor, segments with the images' texts put in) -> the segments that the processor tokenises."""

Complete = Callable[[Any, Mapping[str, object]], None]
"""(processor, the model's configuration): fill in what the processor's files left out."""

PromptOutput = Callable[[Any, Sequence[int], Sequence[Mapping[str, Any]]], Any]
"""(processor, ids of the whole prompt, tensors of each image) -> one output that belongs to the prompt, a tensor
[1, T, ...]; None if this prompt has none."""

Replacement = Callable[[Any, Mapping[str, Any]], str]
"""(processor, outputs for one image) -> the text that stands for the image."""


@dataclass(frozen=True, slots=True)
class Family:
    """What must be known of a processor class that its outputs do not tell. The defaults fit most.

    Attributes:
        complete: How what is missing in the processor's files follows from the model's configuration.
        image_token: The attribute of the processor that holds the token which marks an image in a prompt.
        nested_images: Images go in as one list a prompt, `[[image]]`; otherwise flat, `[image]`.
        call_options: Options of every call, which a request can not set.
        declares_counts: Whether the number of tokens that the processor declares for a size can be believed.
        enclosed: Attributes of the tokens that must stand right before and after an image token; none for most.
        replacement: How the text that stands for an image is found; None: the processor reports it.
        numbered: (processor, text of an image, its index in the prompt) -> the text; None: the index changes nothing.
        company: Whether an image among others is processed in another way than an image alone.
        layout: What the processor does to a prompt's text beyond expanding image tokens.
        dropped_outputs: Outputs that no model reads while it generates, e.g. training labels.
        prompt_outputs: Outputs that belong to the whole prompt, by name, and how they follow from ids and images.
        special_tokens: Whether the tokenizer's own special tokens are put around a prompt, if its settings say so.
        takes_rows: Whether an image's tokens take feature rows; not where images are read by cross attention.
        needs_image: Text alone is refused by the processor.
        most_images: Images that one prompt may have; None: any number.
        writes_token: The processor writes the image token in front of the text itself.
        refused: Why this processor can not be used; None if it can.
    """

    complete: Complete | None = None
    image_token: str = "image_token"
    nested_images: bool = True
    call_options: Mapping[str, object] = field(default_factory=dict)
    declares_counts: bool = True
    enclosed: tuple[str, str] | None = None
    replacement: Replacement | None = None
    numbered: Callable[[Any, str, int], str] | None = None
    company: bool = False
    layout: Layout | None = None
    dropped_outputs: tuple[str, ...] = ()
    prompt_outputs: Mapping[str, PromptOutput] = field(default_factory=dict)
    special_tokens: bool = True
    takes_rows: bool = True
    needs_image: bool = False
    most_images: int | None = None
    writes_token: bool = False
    refused: str | None = None
