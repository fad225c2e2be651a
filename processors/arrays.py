"""numpy arrays and torch tensors as pictures.

    [H, W]         grey
    [H, W, C]      C of 1 (grey), 2 (grey and alpha), 3 (RGB), 4 (RGBA)
    [C, H, W]      the same, where the last dimension can not be channels

The last dimension decides first: an array whose last dimension is 1 to 4 is `[H, W, C]`, as PIL, numpy and OpenCV
lay pictures out; only otherwise a first dimension of 1 to 4 makes it `[C, H, W]`, as torch lays them out. A torch
tensor is asked the other way round. So a tiny picture is never guessed at twice: give a PIL image if it could be
read both ways. Values: unsigned 8-bit as they are; 16-bit and booleans scaled; floats must lie in 0..1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from processors.errors import MediaError, shorten

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["is_array", "picture_from_array"]

_CHANNELS = (1, 2, 3, 4)


def is_array(source: object) -> bool:
    """Whether `source` is a numpy array or a torch tensor, without importing either."""
    return _is_tensor(source) or (type(source).__module__.split(".")[0] == "numpy" and hasattr(source, "__array__"))


def _is_tensor(source: object) -> bool:
    return any(base.__module__ == "torch" and base.__name__ == "Tensor" for base in type(source).__mro__)


def picture_from_array(source: Any) -> Image.Image:
    """A PIL picture (mode L, LA, RGB or RGBA) of the array.

    Raises:
        MediaError: Not 2 or 3 dimensions, no channel dimension, an unknown dtype, or floats outside 0..1.
    """
    try:
        return _picture(source, _is_tensor(source))
    except (TypeError, RuntimeError, AttributeError) as error:
        raise MediaError(f"the array can not be read as a picture: {shorten(str(error))}") from error


def _picture(source: Any, tensor: bool) -> Image.Image:
    import numpy
    from PIL import Image

    shape = tuple(int(n) for n in source.shape)
    if len(shape) not in (2, 3) or 0 in shape:
        raise MediaError(f"an array of shape {list(shape)} is no picture: give [H, W], [H, W, C] or [C, H, W]")
    if tensor and source.is_floating_point():
        source = source.float()  # numpy has no bfloat16
    values = numpy.asarray(source.detach().cpu()) if tensor else numpy.asarray(source)
    if values.ndim == 3:
        values = numpy.moveaxis(values, _channel_axis(shape, channels_first=tensor), -1)
        if values.shape[-1] == 1:
            values = values[:, :, 0]
    return Image.fromarray(numpy.ascontiguousarray(_to_bytes(values)))


def _channel_axis(shape: tuple[int, ...], channels_first: bool) -> int:
    order = (0, 2) if channels_first else (2, 0)
    for axis in order:
        if shape[axis] in _CHANNELS:
            return axis
    raise MediaError(f"an array of shape {list(shape)} has no channel dimension of 1 to 4 first or last")


def _to_bytes(values: Any) -> Any:
    import numpy

    kind = values.dtype
    if kind == numpy.uint8:
        return values
    if kind == numpy.bool_:
        return values.astype(numpy.uint8) * 255
    if kind == numpy.uint16:
        return numpy.rint(values / 257.0).astype(numpy.uint8)
    if numpy.issubdtype(kind, numpy.floating):
        low, high = float(values.min()), float(values.max())
        if not (low >= 0.0 and high <= 1.0):  # NaN fails too
            raise MediaError(f"float values must lie in 0..1, not {low:g}..{high:g}")
        return numpy.rint(values * 255.0).astype(numpy.uint8)
    if numpy.issubdtype(kind, numpy.integer):
        low, high = int(values.min()), int(values.max())
        if low < 0 or high > 255:
            raise MediaError(f"integer values must lie in 0..255 (uint16: 0..65535), not {low}..{high} as {kind}")
        return values.astype(numpy.uint8)
    raise MediaError(f"an array of dtype {kind} is no picture: give uint8, uint16, bool or floats in 0..1")
