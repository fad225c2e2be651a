"""Mllama: images are read by cross attention. One token marks where an image stands, and takes no row.

Which tokens see which image is told by a mask over the whole prompt, [1, T, images, tiles]: an image is seen from its
token on to the next image's, touching images together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from processors.chat import Segment

if TYPE_CHECKING:
    import torch

__all__ = ["bos_behind_first_images", "cross_attention_mask", "own_token"]


def own_token(processor: Any, outputs: Mapping[str, Any]) -> str:
    """An image's text: the image token itself."""
    return str(processor.image_token)


def bos_behind_first_images(processor: Any, segments: Sequence[Segment]) -> list[Segment]:
    """A beginning-of-sequence token behind the images that a prompt begins with, unless it has one somewhere."""
    bos = str(processor.bos_token)
    if any(segment.kind == "text" and bos in segment.text for segment in segments):
        return list(segments)
    first = next((i for i, segment in enumerate(segments) if segment.kind != "image"), len(segments))
    return [*segments[:first], Segment("text", bos), *segments[first:]]


def cross_attention_mask(
    processor: Any, token_ids: Sequence[int], images: Sequence[Mapping[str, torch.Tensor]]
) -> torch.Tensor | None:
    """Which tokens see which tiles, int64 [1, T, images, tiles]; None without images."""
    import torch
    from transformers.models.mllama.processing_mllama import (
        convert_sparse_cross_attention_mask_to_dense,
        get_cross_attention_token_mask,
    )

    if not images:
        return None
    used = [int(tensors["aspect_ratio_mask"].sum()) for tensors in images]
    dense = convert_sparse_cross_attention_mask_to_dense(
        [get_cross_attention_token_mask(list(token_ids), processor.image_token_id)],
        num_tiles=[used],
        max_num_tiles=max(tensors["aspect_ratio_mask"].shape[-1] for tensors in images),
        length=len(token_ids),
    )
    return torch.from_numpy(dense)
