"""From an image's tensors to the rows that take the place of its token embeddings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from mmserve.errors import InputError, ModelOutputError, RequestError
from mmserve.model.interface import ImageRows
from mmserve.parallel.group import ExchangeError
from processors.features import ImageFeatures
from processors.types import ImageItem

__all__ = ["LAYER_PREFIX", "TILED", "ImageEncoder", "deepstack_layers", "find_image_features", "merge_extra"]

TILED = frozenset({"idefics2", "idefics3", "smolvlm"})
"""Types of models whose `get_image_features` takes tensors [1, tiles, ...], each tile by itself, and gives the rows of
one tile after the other; tests/parity/test_family_parity.py compares them."""

LAYER_PREFIX = "layer "
"""Name of extra rows that are added before the layer whose number follows."""


def find_image_features(model: nn.Module) -> Callable[..., Any] | None:
    """The model's `get_image_features`, the inner model's first: its signature names every tensor. None: no images."""
    for owner in (getattr(model, "model", None), model):
        found = getattr(owner, "get_image_features", None)
        if callable(found):
            return found
    return None


def deepstack_layers(config: Any) -> int:
    """How many text layers get rows of their own from each image, by the model's config; 0 for most."""
    return len(getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None) or ())


@dataclass(frozen=True, slots=True)
class ImageEncoder:
    """Encodes images one by one through the model's own `get_image_features`, or takes the rows that were given.

    Attributes:
        features: That method. width: W, the text model's embedding width.
        dtype: The text model's, which rows are cast to. device: Where the model is.
        deepstack: Layers that get rows of their own from each image.
        tile_by_tile: A picture goes through the method one tile at a time: the model is of `TILED`.
    """

    features: Callable[..., Any]
    width: int
    dtype: torch.dtype
    device: torch.device
    deepstack: int = 0
    tile_by_tile: bool = False

    def __call__(self, images: Sequence[ImageItem]) -> list[ImageRows | Exception]:
        """One result an image: its rows, or the RequestError that is this image's alone."""
        results: list[ImageRows | Exception] = []
        for image in images:
            try:
                results.append(self._encode(image))
            except RequestError as error:
                results.append(error)
        return results

    def check_given(self, given: ImageFeatures) -> None:
        """Raises InputError if rows that were given in place of a picture are not such as this model makes."""
        if given.rows.shape[-1] != self.width:
            raise InputError(f"the rows of image features are {given.rows.shape[-1]} wide, the model's {self.width}")
        layers = 0 if given.deepstack is None else given.deepstack.shape[0]
        if layers != self.deepstack:
            raise InputError(
                f"the image features have DeepStack rows for {layers} layers, the model takes them for {self.deepstack}"
            )

    def _given(self, given: ImageFeatures) -> ImageRows:
        self.check_given(given)
        tensors = [given.rows] if given.deepstack is None else [given.rows, given.deepstack]
        own = [tensor.to(self.device, self.dtype, copy=True) for tensor in tensors]
        if not all(torch.isfinite(tensor).all() for tensor in own):
            raise InputError(f"the image features are not finite in the model's {self.dtype}")
        return ImageRows(rows=own[0], extra={"deepstack": own[1]} if len(own) > 1 else {})

    @torch.inference_mode()
    def _encode(self, image: ImageItem) -> ImageRows:
        if image.features is not None:
            return self._given(image.features)
        tensors = {name: tensor.to(self.device) for name, tensor in image.tensors.items()}
        unknown = tensors.keys() - inspect.signature(self.features).parameters.keys()
        if unknown:
            raise InputError(f"the model takes no image tensors called {', '.join(sorted(unknown))}")
        try:
            if self.tile_by_tile:
                return ImageRows(self._own(self._tiled(tensors), image.range.num_embeds, "rows"))
            output = self.features(**tensors, return_dict=True)
        except RequestError:
            raise
        except ExchangeError:  # a rank is gone: no image's fault
            raise
        except Exception as error:  # the model's own code: whatever it raises is this image's failure
            shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
            raise ModelOutputError(f"the vision tower failed on an image of {shapes}: {error}") from error
        expected = image.range.num_embeds
        layers = getattr(output, "deepstack_features", None)
        layers = [] if layers is None else list(layers)
        if layers and isinstance(layers[0], tuple) and isinstance(layers[0][0], int):
            return self._for_layers(layers, expected)
        rows = self._own(_as_rows(_features(output), self.width), expected, "rows")
        extra = {}
        if layers:
            stacked = [self._own(_as_rows(layer, self.width), expected, "DeepStack rows") for layer in layers]
            extra["deepstack"] = torch.stack(stacked)
        return ImageRows(rows=rows, extra=extra)

    def _tiled(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Rows [n, W] of tensors [1, tiles, ...]; what is alive beside them and the pixels is that of one tile."""
        rows = []
        for tile in range(next(iter(tensors.values())).shape[1]):
            output = self.features(
                **{name: tensor[:, tile : tile + 1] for name, tensor in tensors.items()}, return_dict=True
            )
            rows.append(_as_rows(_features(output), self.width))
        return torch.cat(rows)

    def _for_layers(self, layers: Sequence[tuple[int, Any]], expected: int) -> ImageRows:
        """Rows that come in at layers of given numbers only (Granite 4 Vision): none take an embedding's place."""
        extra = {
            f"{LAYER_PREFIX}{layer}": self._own(_as_rows(features, self.width), expected, f"rows of layer {layer}")
            for layer, features in layers
        }
        return ImageRows(rows=torch.zeros(expected, self.width, dtype=self.dtype, device=self.device), extra=extra)

    def _own(self, rows: torch.Tensor, expected: int, what: str) -> torch.Tensor:
        """Checked, cast, and in storage of its own: a view would keep a whole batch of features alive."""
        if rows.shape[0] != expected:
            raise ModelOutputError(f"the model made {rows.shape[0]} {what} for an image whose range takes {expected}")
        cast = rows.to(self.dtype)
        if not torch.isfinite(cast).all():  # after the cast, which may overflow by itself
            raise ModelOutputError(
                f"the vision tower produced {what} that are not finite in {self.dtype}; "
                "load the model in bfloat16 or float32"
            )
        return cast.clone(memory_format=torch.contiguous_format)


def _features(output: Any) -> Any:
    """The features in what `get_image_features` gives: an output object or dict, or themselves.

    Raises:
        ModelOutputError: It gives something else.
    """
    if isinstance(output, (torch.Tensor, list, tuple)) and not hasattr(output, "pooler_output"):
        return output
    get = output.get if isinstance(output, Mapping) else partial(getattr, output)
    found = get("pooler_output", None)
    if found is None:
        found = get("last_hidden_state", None)
    if found is None:
        raise ModelOutputError(
            f"get_image_features gives {type(output).__name__} with neither pooler_output nor last_hidden_state"
        )
    return found


def _as_rows(features: Any, width: int) -> torch.Tensor:
    """[n, W] from a list or tuple of tensors, or one tensor of any rank whose last dimension is W."""
    if isinstance(features, torch.Tensor):
        parts = [features]
    elif isinstance(features, (list, tuple)) and all(isinstance(part, torch.Tensor) for part in features):
        parts = list(features)
    else:
        raise ModelOutputError(f"get_image_features gives {type(features).__name__}, not rows")
    wrong = [tuple(part.shape) for part in parts if part.dim() == 0 or part.shape[-1] != width]
    if wrong:
        raise ModelOutputError(f"image features of shape {wrong[0]} do not end in the text width {width}")
    if not parts:
        raise ModelOutputError("get_image_features gives no rows at all")
    return torch.cat([part.reshape(-1, width) for part in parts])


def merge_extra(placed: Sequence[tuple[Mapping[str, torch.Tensor], int, int]], name: str) -> torch.Tensor:
    """Rows `first..first+n-1` of the extra tensor `name` of each (extra, first, n), joined: [..., sum n, W]."""
    return torch.cat([extra[name][..., first : first + n, :] for extra, first, n in placed], dim=-2)
