"""What a model's config.json says that prompts depend on; what it leaves out is taken from its class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["TextModel"]


@dataclass(frozen=True, slots=True)
class TextModel:
    """The text side of a model.

    Attributes:
        width: Of its embeddings, and so of an image's rows; None if that is not known.
        vocabulary: Rows of its table of embeddings; None if that is not known.
    """

    width: int | None = None
    vocabulary: int | None = None

    @classmethod
    def of(cls, model_config: Mapping[str, object]) -> TextModel:
        """Read the content of a config.json, of which the text part may be a level of its own."""
        config = _text_config(model_config)
        return cls(_number(config, "hidden_size"), _number(config, "vocab_size"))


def _text_config(model_config: Mapping[str, object]) -> Any:
    """The text part's configuration; None if there is none, or none that can be read."""
    from transformers import CONFIG_MAPPING

    model_type = model_config.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING or len(model_config) == 1:
        return None  # a file that only names the type is no model's
    try:
        return CONFIG_MAPPING[model_type].from_dict(dict(model_config)).get_text_config(decoder=True)
    except Exception:  # noqa: BLE001 - a config that can not be read is the model's to complain about
        return None


def _number(config: Any, name: str) -> int | None:
    found = getattr(config, name, None)
    return found if isinstance(found, int) else None
