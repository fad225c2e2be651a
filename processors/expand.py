"""One image through the model's own processor: its tensors, and the text that stands for it in the prompt.

Each image is processed alone. Its tensors then can not depend on a neighbour (no padding to the largest picture of
the call, no leading prompt dimension to take apart), so there is nothing to split, equal images are processed once,
and images of a prompt can be processed side by side. That the ids put together from the parts are those of the
processor's own call over the whole prompt is checked when a processor is loaded.

One family treats an image among others differently from an image alone (`Family.company`): such an image is processed
with a copy of itself beside it, and its half of the outputs is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from processors.errors import OptionError, ProcessorError, UnsupportedProcessorError, shorten
from processors.families import Family
from processors.types import stored_bytes

if TYPE_CHECKING:
    import torch
    from PIL import Image

    from processors.picture import Picture

__all__ = ["TEXT_OUTPUTS", "Expansion", "ImageExpander", "call_errors"]

TEXT_OUTPUTS = frozenset(
    {
        "input_ids",
        "attention_mask",
        "token_type_ids",
        "mm_token_type_ids",
        "text_replacement_offsets",
        "offset_mapping",
        "special_tokens_mask",
    }
)
"""Outputs that belong to the text of a prompt, in every family."""


_LEAST_REPEATS = 4096
"""Values of a tensor from which it is worth looking whether they are all the same."""

_LEAST_SIDE = 8
"""Pixels a side from which pictures go as packed pixels: with fewer, some code takes a side for the channels."""


def call_errors() -> tuple[type[Exception], ...]:
    """What processors raise on pictures, options and prompts that they were not written for."""
    from huggingface_hub.errors import StrictDataclassError

    plain = (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError, AttributeError, OSError)
    return (*plain, StrictDataclassError)


@dataclass(frozen=True, slots=True)
class Expansion:
    """One processed image: the text that stands for it, and its tensors."""

    text: str
    tensors: Mapping[str, torch.Tensor]

    def nbytes(self) -> int:
        """Bytes of memory that the tensors take."""
        return stored_bytes(self.tensors)

    def equals(self, other: Expansion) -> bool:
        """Whether text and tensors are the same, to the bit."""
        import torch

        return (
            self.text == other.text
            and self.tensors.keys() == other.tensors.keys()
            and all(t.dtype == other.tensors[n].dtype for n, t in self.tensors.items())
            and all(torch.equal(t, other.tensors[n]) for n, t in self.tensors.items())
        )


class ImageExpander:
    """Calls a Hugging Face processor with one image at a time.

    The call always has the same text settings, so the processor's tokenizer is never reconfigured between calls.
    """

    def __init__(self, processor: Any, family: Family) -> None:
        self._processor = processor
        self._family = family
        self._name = type(processor).__name__
        token = str(getattr(processor, family.image_token))
        before, after = (str(getattr(processor, name)) for name in family.enclosed) if family.enclosed else ("", "")
        self.image_text = f"{before}{token}{after}"
        """The least text that the processor takes for one image."""
        self.company = family.company
        """Whether an image among others is processed in another way than an image alone."""
        self.takes_planes = False
        """Whether pictures are handed over as packed pixels; set by `try_planes`."""

    def try_planes(self, pictures: Sequence[Picture]) -> None:
        """Hand pictures over as packed pixels from now on, if that makes exactly the same of each of `pictures`."""
        ways = [True, False] if self.company else [True]
        try:
            before = [self.expand(picture, {}, alone) for picture in pictures for alone in ways]
            self.takes_planes = True
            after = [self.expand(picture, {}, alone) for picture in pictures for alone in ways]
        except ProcessorError:
            self.takes_planes = False
            return
        self.takes_planes = all(one.equals(other) for one, other in zip(before, after, strict=True))

    def call(
        self, text: str, images: Sequence[Image.Image | torch.Tensor], options: Mapping[str, object]
    ) -> Mapping[str, Any]:
        """The processor's own call for one prompt; pictures as PIL images, or as uint8 tensors [3, height, width]."""
        import torch

        settings: dict[str, object] = {
            "padding": False,
            "return_tensors": "pt",
            "return_mm_token_type_ids": True,
            "return_text_replacement_offsets": True,
            **self._family.call_options,
            **options,
        }
        if images and isinstance(images[0], torch.Tensor):
            settings["input_data_format"] = "channels_first"
        nested = [list(images)] if self._family.nested_images else list(images)
        if self._family.writes_token:
            text = text.replace(self.image_text, "")
        outputs = self._processor(text=[text], images=nested, **settings)
        assert isinstance(outputs, Mapping)
        return outputs

    def expand(self, picture: Picture, options: Mapping[str, object], alone: bool = True) -> Expansion:
        """Process one picture; `alone`: it is the only one of its prompt.

        Raises:
            OptionError: The processor refuses it with these options.
            ProcessorError: The processor can not process a picture of this size.
            UnsupportedProcessorError: Its outputs have a form that is not known.
        """
        copies = 1 if alone or not self._family.company else 2
        size = f"{picture.size[0]}x{picture.size[1]}"
        packed = self.takes_planes and min(picture.size) >= _LEAST_SIDE
        image = picture.tensor() if packed else picture.image
        try:
            outputs = self.call(self.image_text * copies, [image] * copies, options)
        except call_errors() as error:
            kind = OptionError if options else ProcessorError
            given = f" with the options {shorten(dict(options))}" if options else ""
            raise kind(f"{self._name} can not process an image of {size}{given}: {shorten(str(error), 200)}") from error
        text = self._replacement(outputs)
        if not text:
            raise ProcessorError(f"{self._name} makes no tokens of an image of {size}")
        tensors = {name: self._own_part(name, value, copies) for name, value in self.image_outputs(outputs).items()}
        return Expansion(text, tensors)

    def _replacement(self, outputs: Mapping[str, Any]) -> str:
        if self._family.replacement is not None:
            return self._family.replacement(self._processor, outputs)
        offsets = outputs.get("text_replacement_offsets")
        if not offsets or not offsets[0]:
            raise UnsupportedProcessorError(f"{self._name} does not report the text that it puts in an image's place")
        return str(offsets[0][0]["replacement"])

    def image_outputs(self, outputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The outputs that do not belong to the text, as tensors.

        Raises:
            UnsupportedProcessorError: One is no tensor and no numbers.
        """
        import numpy
        import torch

        found: dict[str, torch.Tensor] = {}
        for name, value in outputs.items():
            if name in TEXT_OUTPUTS or name in self._family.dropped_outputs or name in self._family.prompt_outputs:
                continue
            if isinstance(value, list) and _is_numbers(value):
                value = torch.tensor(value)
            elif isinstance(value, numpy.ndarray):
                value = torch.from_numpy(value)
            if not isinstance(value, torch.Tensor):
                raise UnsupportedProcessorError(f"{self._name} returns {name!r} as a {type(value).__name__}")
            found[name] = value
        return found

    def _own_part(self, name: str, value: torch.Tensor, copies: int) -> torch.Tensor:
        own = value if copies == 1 or value.shape[0] != copies else value[:1].clone()
        return _without_repeats(own)


def _without_repeats(value: torch.Tensor) -> torch.Tensor:
    """`value` itself; or, if it is one integer throughout, a view of the same shape and dtype of that integer alone.

    A mask that says that all pixels count is int64 in some families: twice the bytes of the pixels' one channel.
    """
    if value.is_floating_point() or value.is_complex() or value.numel() < _LEAST_REPEATS:
        return value
    import torch

    low, high = torch.aminmax(value)  # reads the values once, and writes nothing as large
    return low.expand(value.shape) if bool(low == high) else value


def _is_numbers(value: object) -> bool:
    """Whether `value` is an integer or nested lists of them, as some processors return counts and grids."""
    if isinstance(value, (list, tuple)):
        return all(_is_numbers(item) for item in value)
    return isinstance(value, int)
