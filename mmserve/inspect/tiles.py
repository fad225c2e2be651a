"""From an image's tensors back to pictures: tiles, or patches put together again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from PIL import Image

__all__ = ["Normalization", "tile_pictures"]


@dataclass(frozen=True, slots=True)
class Normalization:
    """How a processor's pixel values come about: (value in 0..1 - mean) / std, a channel each."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, mean_and_std: tuple[Sequence[float], Sequence[float]] | None) -> Normalization:
        """From the processor's own numbers; None: pixel values are taken as they are."""
        if mean_and_std is None:
            return cls((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
        return cls(tuple(mean_and_std[0]), tuple(mean_and_std[1]))


def tile_pictures(
    tensors: Mapping[str, torch.Tensor], normalization: Normalization, geometry: tuple[int, int, int] | None
) -> list[Image.Image]:
    """The pictures in an image's `pixel_values`; empty if they are laid out in a way that is not known here.

    Known are tiles `[..., 3, height, width]`, and rows of flattened patches `[N, 3 * frames * P * P]` with their
    `image_grid_thw`, as Qwen2-VL and its kin have them.

    Args:
        tensors: The image's. normalization: How its pixel values came about.
        geometry: Side and frames of a patch, and patches a side that are merged; None: the processor does not say.
    """
    pixels = tensors.get("pixel_values")
    if pixels is None:
        return []
    if pixels.ndim >= 4 and pixels.shape[-3] == len(normalization.mean):
        if geometry is not None and tuple(pixels.shape[-2:]) == (geometry[0], geometry[0]):
            return []  # single patches, in an order that is not known
        tiles = pixels.reshape(-1, *pixels.shape[-3:])
        return [_picture(tile, normalization) for tile in tiles]
    grid = tensors.get("image_grid_thw")
    if pixels.ndim == 2 and grid is not None and geometry is not None:
        joined = _join_patches(pixels, [int(n) for n in grid.reshape(-1)[:3]], len(normalization.mean), geometry)
        return [] if joined is None else [_picture(joined, normalization)]
    return []


def _join_patches(
    rows: torch.Tensor, grid: Sequence[int], channels: int, geometry: tuple[int, int, int]
) -> torch.Tensor | None:
    """The picture [C, height, width] of patches in blocks of merge x merge, each of `C x frames x P x P` values."""
    side, frames, merge = geometry
    _, height, width = grid
    if rows.shape[0] < height * width:
        return None
    if channels * frames * side * side != rows.shape[1] or height % merge or width % merge:
        return None
    blocks = rows[: height * width].reshape(height // merge, width // merge, merge, merge, channels, frames, side, side)
    picture = blocks[:, :, :, :, :, 0].permute(4, 0, 2, 5, 1, 3, 6)
    return picture.reshape(channels, height * side, width * side)


def _picture(values: torch.Tensor, normalization: Normalization) -> Image.Image:
    import torch
    from PIL import Image

    mean = torch.tensor(normalization.mean)[:, None, None]
    std = torch.tensor(normalization.std)[:, None, None]
    shown = (values.float() * std + mean).clamp(0, 1) * 255
    return Image.fromarray(shown.round().to(torch.uint8).permute(1, 2, 0).numpy())
