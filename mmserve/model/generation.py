"""A model's own defaults for generating."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mmserve.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import GenerationConfig

__all__ = ["load_generation_config"]


def load_generation_config(folder: Path, *, trust_remote_code: bool = False) -> GenerationConfig:
    """The folder's generation_config.json; without one, what transformers reads from config.json.

    Raises:
        UnsupportedModelError: generation_config.json can not be read.
    """
    from transformers import AutoConfig, GenerationConfig

    if (folder / "generation_config.json").is_file():
        try:
            return GenerationConfig.from_pretrained(folder)
        except (OSError, ValueError, TypeError) as error:
            raise UnsupportedModelError(
                f"generation_config.json of {str(folder)!r} can not be read: {' '.join(str(error).split())}"
            ) from error
    return GenerationConfig.from_model_config(AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code))
