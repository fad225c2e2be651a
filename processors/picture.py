"""An upright RGB picture whose pixels are packed once: its key is made of them, and most processors take them as they
are, which spares a processor its own way from a PIL image to a tensor (a third of its time)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from PIL import Image

__all__ = ["Picture"]


class Picture:
    """Upright, 8-bit RGB; as a PIL image, as packed pixels, as a tensor: each made when it is first needed."""

    __slots__ = ("_image", "_planes", "size")

    def __init__(self, image: Image.Image) -> None:
        """`image`: from `processors.media.load_image`; nobody may write to it afterwards."""
        self.size = image.size
        """(width, height)."""
        self._image: Image.Image | None = image
        self._planes: bytearray | None = None

    @classmethod
    def packed(cls, image: Image.Image) -> Picture:
        """Of an upright RGB image that is somebody else's: packed now, not kept."""
        picture = cls(image)
        picture.planes()
        picture._image = None
        return picture

    @property
    def image(self) -> Image.Image:
        """As a PIL image, mode RGB."""
        if self._image is None:
            from PIL import Image

            planes, area = self.planes(), self.size[0] * self.size[1]
            channels = [planes[area * i : area * (i + 1)] for i in range(3)]
            self._image = Image.merge("RGB", [Image.frombuffer("L", self.size, c, "raw", "L", 0, 1) for c in channels])
        return self._image

    def planes(self) -> bytearray:
        """All red values row by row, then all green, then all blue: 3 x height x width bytes. Not to be written to."""
        if self._planes is None:
            image = self.image
            # One plane at a time is faster than all three interleaved, to be taken apart afterwards.
            self._planes = bytearray().join(image.tobytes("raw", channel) for channel in "RGB")
        return self._planes

    def tensor(self) -> torch.Tensor:
        """The planes as uint8 [3, height, width], sharing their memory."""
        import torch

        width, height = self.size
        return torch.frombuffer(self.planes(), dtype=torch.uint8).reshape(3, height, width)
