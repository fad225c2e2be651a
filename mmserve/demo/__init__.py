"""The demo: a small trained model inside the package, a few pictures, and questions about them."""

from __future__ import annotations

from pathlib import Path

__all__ = ["demo_model_folder"]


def demo_model_folder() -> Path:
    """The folder of the model that ships with the package; `fixtures/demo_model` says how it was made."""
    return Path(__file__).parent / "model"
