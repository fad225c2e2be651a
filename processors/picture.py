"""An upright RGB picture whose pixels are packed once: its key is made of them, and most processors take them as they
are, which spares a processor its own way from a PIL image to a tensor (a third of its time)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from processors.planes import pack_planes

if TYPE_CHECKING:
    import torch
    from PIL import Image

__all__ = ["Picture"]


class Picture:
    """Upright, 8-bit RGB; as a PIL image, as packed pixels, as a tensor: each made when it is first needed."""

    __slots__ = ("_image", "_is_own", "_planes", "size")

    def __init__(self, image: Image.Image, *, own: bool = True) -> None:
        """`image`: from `processors.media.load_image`; nobody may write to it afterwards.

        Not `own`: an upright RGB image, decoded, that is somebody else's. It is read when pixels are first needed, and
        not handed on.
        """
        self.size = image.size
        """(width, height)."""
        self._image: Image.Image | None = image
        self._is_own = own
        self._planes: memoryview | None = None

    @property
    def image(self) -> Image.Image:
        """As a PIL image, mode RGB."""
        if self._image is None or not self._is_own:
            from PIL import Image

            planes, area = self.planes(), self.size[0] * self.size[1]
            channels: list[Any] = [planes[area * i : area * (i + 1)] for i in range(3)]
            self._image = Image.merge("RGB", [Image.frombuffer("L", self.size, c, "raw", "L", 0, 1) for c in channels])
            self._is_own = True
        return self._image

    def planes(self) -> memoryview:
        """All red values row by row, then all green, then all blue: 3 x height x width bytes. Not to be written to."""
        if self._planes is None:
            assert self._image is not None
            self._planes = pack_planes(self._image)
            if not self._is_own:
                self._image = None
        return self._planes

    def tensor(self) -> torch.Tensor:
        """The planes as uint8 [3, height, width], sharing their memory."""
        import torch

        width, height = self.size
        return torch.frombuffer(self.planes(), dtype=torch.uint8).reshape(3, height, width)
