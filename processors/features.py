"""An image given as the rows that the model's vision side made of it, in place of the picture.

    picture ──get_image_features of the model──> rows [n, W] ──ImageFeatures(rows, size)──> where a picture goes

What stands for an image in a prompt follows from its size alone, so the size comes with the rows: a blank picture of
that size goes through the model's processor, its text is taken and its pixels are dropped, and the rows must be exactly
as many as that text has places for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from processors.errors import MediaError, shorten
from processors.hashing import canonical

if TYPE_CHECKING:
    import torch

__all__ = ["ImageFeatures", "check_count", "features_key", "own_features", "without_pixels"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ImageFeatures:
    """One image as its embedding rows.

    Attributes:
        rows: [n, W], one a token that takes a row, in the order of the tokens; float32, float16 or bfloat16. W is the
            width of the text model's embeddings.
        size: (width, height) of the picture that they were made of.
        deepstack: [layers, n, W], where the model adds rows to its first layers too (Qwen3-VL and its kin).
    """

    rows: torch.Tensor
    size: tuple[int, int]
    deepstack: torch.Tensor | None = None

    def __repr__(self) -> str:
        """Shapes, never values."""
        shape, dtype = (getattr(self.rows, name, type(self.rows).__name__) for name in ("shape", "dtype"))
        return f"ImageFeatures({shape}, {dtype}, of a picture of {self.size})"

    @classmethod
    def of(cls, output: Any, size: tuple[int, int]) -> ImageFeatures:
        """From what `get_image_features(..., return_dict=True)` gave for one image alone.

        Args:
            output: Its output, with `pooler_output` (a tensor [..., W], or a list of them; where a family leaves it
                out, such as Fuyu, `last_hidden_state`) and, in some families, `deepstack_features` (such a tensor a
                layer).
            size: (width, height) of the picture.

        Raises:
            MediaError: The output has no rows.
        """
        import torch

        pooled = getattr(output, "pooler_output", None)
        rows = _joined(pooled if pooled is not None else getattr(output, "last_hidden_state", None))
        layers = getattr(output, "deepstack_features", None)
        stacked = None if layers is None or not len(layers) else torch.stack([_joined(layer) for layer in layers])
        return cls(rows, size, stacked)


def _joined(features: Any) -> torch.Tensor:
    """[n, W] from a tensor [..., W] or a list of them."""
    import torch

    parts = list(features) if isinstance(features, (list, tuple)) else [features]
    if not parts or not all(isinstance(part, torch.Tensor) and part.dim() for part in parts):
        raise MediaError(
            f"image features are taken from a `pooler_output` of tensors, not from {shorten(type(features).__name__)}"
        )
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def own_features(given: ImageFeatures, width: int | None, max_pixels: int) -> ImageFeatures:
    """A checked copy on the CPU that the caller can not write to; `width`: the model's, None if it is not known.

    Raises:
        MediaError: The wrong type, number of dimensions, width or dtype, values that are not finite, or no size.
    """
    size = given.size
    if not (isinstance(size, (tuple, list)) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)):
        raise MediaError(f"image features need the (width, height) of their picture, not {shorten(size)}")
    if size[0] * size[1] > max_pixels:
        raise MediaError(
            f"image features of a picture of {size[0]}x{size[1]}: {size[0] * size[1]} pixels are over the limit of "
            f"{max_pixels} (max_image_pixels)"
        )
    rows = _own_rows(given.rows, 2, "rows", width)
    if given.deepstack is None:
        return ImageFeatures(rows, (size[0], size[1]))
    stacked = _own_rows(given.deepstack, 3, "DeepStack rows", width)
    if stacked.shape[1:] != rows.shape:
        raise MediaError(
            f"the DeepStack rows are {list(stacked.shape)}: not [layers, {rows.shape[0]}, {rows.shape[1]}], as the rows"
        )
    return ImageFeatures(rows, (size[0], size[1]), stacked)


def _own_rows(given: Any, dims: int, what: str, width: int | None) -> torch.Tensor:
    import numpy
    import torch

    if isinstance(given, numpy.ndarray) and given.dtype in (numpy.float32, numpy.float16):
        given = torch.from_numpy(numpy.ascontiguousarray(given))
    if not isinstance(given, torch.Tensor):
        kind = getattr(given, "dtype", type(given).__name__)
        raise MediaError(f"image features must be a torch tensor or a numpy array of floats: the {what} are {kind}")
    if given.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise MediaError(f"the {what} of image features are {given.dtype}: give float32, float16 or bfloat16")
    form = "[n, W]" if dims == 2 else "[layers, n, W]"
    if given.dim() != dims or 0 in given.shape:
        raise MediaError(f"the {what} of image features are {list(given.shape)}, not {form}")
    if width is not None and given.shape[-1] != width:
        raise MediaError(f"the {what} of image features are {given.shape[-1]} wide, but the model's are {width}")
    if given.layout != torch.strided or given.is_meta:
        raise MediaError(f"the {what} of image features are no plain tensor (layout {given.layout})")
    own = given.detach().to("cpu", copy=True).contiguous()
    if not torch.isfinite(own).all():
        raise MediaError(f"the {what} of image features hold values that are not finite")
    return own


def check_count(features: ImageFeatures, places: int, number: int) -> None:
    """Raises MediaError if image `number` of the prompt has other rows than its tokens have places for."""
    if places == 0:
        raise MediaError(f"image {number} is given as features, but this model reads images by cross attention")
    if features.rows.shape[0] != places:
        raise MediaError(
            f"the features of image {number} are {features.rows.shape[0]} rows, but a picture of "
            f"{features.size[0]}x{features.size[1]} takes {places}"
        )


def features_key(
    features: ImageFeatures, options: Mapping[str, object], processor: str, image_id: str | None = None
) -> str:
    """The content key: over values, dtype, shape, the picture's size, options and processor; never a picture's key."""
    digest = hashlib.sha256()
    settings = canonical(options)
    digest.update(f"features|{processor}|{len(settings)}|".encode() + settings)
    digest.update(f"|{features.size[0]}x{features.size[1]}|".encode())
    if image_id is not None:
        digest.update(b"id|" + image_id.encode("utf-8", "surrogatepass"))
        return digest.hexdigest()
    import torch

    for tensor in (features.rows, features.deepstack):
        if tensor is not None:
            digest.update(f"|{tensor.dtype}|{list(tensor.shape)}|".encode())
            digest.update(tensor.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def without_pixels(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What says where an image's rows stand (grids, sizes, counts), without its pixels and their masks."""
    return {name: tensor for name, tensor in tensors.items() if "pixel" not in name}
