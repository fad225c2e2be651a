"""Which per-request options a processor takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from processors.errors import OptionError, shorten
from processors.limits import OptionLimits

__all__ = ["OptionTable"]

_OURS = frozenset(
    {
        "return_tensors", "device", "data_format", "input_data_format", "disable_grouping",
        "image_seq_length", "return_row_col_info", "patch_size", "temporal_patch_size", "merge_size",
        "max_image_tiles",
    }
)  # fmt: skip
"""Not for a request: where and in which layout outputs are made, what the text that stands for an image needs, and
the geometry that the model's weights were made for (Mllama numbers the arrangements of at most so many tiles, and has
an embedding for each number)."""


@dataclass(frozen=True, slots=True)
class OptionTable:
    """The options that one processor takes for images, and how far they may go."""

    known: frozenset[str]
    limits: OptionLimits

    @classmethod
    def of(cls, processor: Any) -> OptionTable:
        """Read the typed dictionaries in which transformers declares them."""
        declared = processor.valid_processor_kwargs.__annotations__["images_kwargs"].__annotations__
        own = getattr(getattr(processor.image_processor, "valid_kwargs", None), "__annotations__", {})
        known = frozenset({*declared, *own}) - _OURS
        return cls(known, OptionLimits.of(processor.image_processor, known))

    def check(self, options: Mapping[str, object], max_pixels: int) -> None:
        """Raises OptionError naming what is unknown and listing the known, or naming a value that leads to too much."""
        unknown = sorted(str(name) for name in options if name not in self.known)
        fixed = [name for name in unknown if name in _OURS]
        if fixed:
            raise OptionError(
                f"processor options {', '.join(fixed)} can not be set by a request: outputs and the model's weights "
                f"depend on their values; those of a request are: {', '.join(sorted(self.known))}"
            )
        if unknown:
            shown = ", ".join(shorten(name, 60) for name in unknown[:5])
            raise OptionError(
                f"unknown processor options: {shown}; this processor takes: {', '.join(sorted(self.known))}"
            )
        self.limits.check(options, max_pixels)
