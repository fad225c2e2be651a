"""Architectures of the image+text mapping that make no text from an image and a text: refused by name."""

from __future__ import annotations

from typing import Final

__all__ = ["REFUSED"]

REFUSED: Final[dict[str, str]] = {
    "diffusion_gemma": "it writes by block diffusion, not token after token",
    "evolla": "it describes proteins, not images",
    "instructblipvideo": "it takes videos, not images",
    "llama4": "in transformers 5.24 its own forward, and so generate(), ends in an AttributeError (image_outputs)",
    "pi0": "it gives robot actions, not text",
    "pix2struct": "it has no text prompt: its question is drawn into the picture",
    "pp_formulanet": "it has no text prompt: it turns a picture into a formula",
    "shieldgemma2": "it is a classifier of pictures, and its weights are not those of the text model it maps to",
    "udop": "it takes words with their boxes on a page, not a text prompt",
    "vision-encoder-decoder": "it has no text prompt: it captions or transcribes a picture",
}
"""model_type -> why."""
