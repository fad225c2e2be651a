"""The model layer: a transformers model over a paged cache, behind the seam of `mmserve.model.interface`.

from mmserve.model import load_model
model = load_model(Path("folder"), block_size=16)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmserve.model.load import load_model

__all__ = ["load_model"]


def __getattr__(name: str) -> object:
    """Import on first use: this package must not bring transformers in with it."""
    if name == "load_model":
        return importlib.import_module("mmserve.model.load").load_model
    raise AttributeError(f"module 'mmserve.model' has no attribute {name!r}")
