"""Architectures of the image+text mapping that make no text from an image and a text: refused by name."""

from __future__ import annotations

from typing import Final

__all__ = ["REFUSED"]

REFUSED: Final[dict[str, str]] = {
    "blip": "its pictures have no place among the prompt's tokens, and its generate() drops the last of these",
    "diffusion_gemma": "it writes by block diffusion, not token after token",
    "evolla": "it describes proteins, not images",
    "git": "its pictures have no place among the prompt's tokens: they are put before them",
    "instructblipvideo": "it takes videos, not images",
    "llama4": "in transformers 5.24 its own forward, and so generate(), ends in an AttributeError (image_outputs)",
    "pi0": "it gives robot actions, not text",
    "pix2struct": "it has no text prompt: its question is drawn into the picture",
    "pp_formulanet": "it has no text prompt: it turns a picture into a formula",
    "shieldgemma2": "it classifies pictures; Gemma 3, which it is mapped to, finds none of its text weights by name",
    "udop": "it takes words with their boxes on a page, not a text prompt",
    "vision-encoder-decoder": "it has no text prompt: it captions or transcribes a picture",
}
"""model_type -> why."""
