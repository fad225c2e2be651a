"""The books of encoded images: which ones a chunk needs, which are to be encoded, and for how long they are held.

An image is held from the step that first computes one of its tokens to the step that computes its last one. How
many are encoded in a step, and how many bytes are held, is bounded; a chunk ends before the first image that is
over a bound, and what one request needs at once is always let through when nobody else is in the way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from mmserve.cache.encoder_ledger import EncoderLedger
from mmserve.engine.batch import ImageToEncode, ScheduledBatch, StepOutput
from mmserve.engine.request import Request
from mmserve.engine.spans import before_span

__all__ = ["ImageBooks", "ImageStep"]


@dataclass(slots=True)
class ImageStep:
    """The images of a step being put together: how many more may be encoded, which are, which are dropped."""

    left: int
    encode: list[ImageToEncode] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)


class ImageBooks:
    """The ledger of encoded images, and what requests hold of it.

    Args:
        capacity: Bytes of rows to keep.
        max_per_step: Most images encoded in one step.
    """

    def __init__(self, capacity: int, max_per_step: int) -> None:
        self.ledger = EncoderLedger(capacity)
        self.num_uses = 0
        self.num_encodes = 0
        self._max_per_step = max_per_step

    def begin_step(self) -> ImageStep:
        """A new step; rows beyond the budget that nobody needs are dropped in it."""
        return ImageStep(self._max_per_step, dropped=self.ledger.trim())

    def limit(self, request: Request, start: int, stop: int, step: ImageStep) -> int:
        """Where a chunk start..stop has to end for the images' sake; `start` if it has to wait.

        Changes nothing.
        """
        left, nbytes = step.left, 0
        seen: set[str] = set()
        for image in request.images[request.next_image :]:
            if image.first_row >= stop:
                break
            entry = self.ledger.get(image.key)
            if image.last_row < start or image.key in seen or (entry is not None and entry.refcount > 0):
                continue
            seen.add(image.key)
            nbytes += self.ledger.estimate(image.num_rows) if entry is None else entry.nbytes
            left -= entry is None
            if left >= 0 and self.ledger.fits(nbytes):
                continue
            cut = before_span(request.spans, image.first_row)
            if cut > start:
                return cut
            if step.encode or self.ledger.held_bytes:
                return start
            # Nobody else holds or encodes anything: what this request needs at once is let through, or an
            # image (or a span of several) over a bound would wait for ever.
        return stop

    def hold(self, request: Request, stop: int, step: ImageStep) -> None:
        """Hold every image with rows before `stop`; those without an entry are encoded in this step."""
        wanted = []
        for position in range(request.next_image, len(request.images)):
            if request.images[position].first_row >= stop:
                break
            if position not in request.held:
                wanted.append(position)
        self.num_uses += len(wanted)
        # Those that exist come first: making room for a new one must not drop them.
        wanted.sort(key=lambda position: request.images[position].key not in self.ledger)
        for position in wanted:
            image = request.images[position]
            entry = self.ledger.get(image.key)
            if entry is None:
                self._make_room(self.ledger.estimate(image.num_rows), step)
                entry = self.ledger.reserve(image.key, image.num_rows)
                step.encode.append(ImageToEncode(request.request_id, image.index, image.key))
                step.left -= 1
                self.num_encodes += 1
            self.ledger.hold(entry)
            request.held[position] = entry

    def settle(self, batch: ScheduledBatch, output: StepOutput) -> None:
        """Take in which of the step's images were encoded, and how large they are."""
        for image in batch.encode:
            if image.key in output.image_bytes:
                self.ledger.settle(image.key, output.image_bytes[image.key])
            else:
                self.ledger.discard(image.key)

    def skip_to(self, request: Request, start: int) -> None:
        """A request begins at `start`: images whose rows all lie before it are not needed."""
        while request.next_image < len(request.images) and request.images[request.next_image].last_row < start:
            request.next_image += 1

    def release_computed(self, request: Request) -> None:
        """Let go of images whose last row has been computed."""
        first = request.next_image
        self.skip_to(request, request.num_computed)
        for position in range(first, request.next_image):
            entry = request.held.pop(position, None)
            if entry is not None:
                self.ledger.release(entry)

    def release(self, request: Request) -> None:
        """Let go of all; the request has not started any more."""
        for entry in request.held.values():
            self.ledger.release(entry)
        request.held = {}
        request.next_image = 0

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Ledger and requests agree.

        Raises:
            RuntimeError: With the first contradiction found.
        """
        self.ledger.check_integrity()
        uses = sum(len(request.held) for request in requests)
        if uses != self.ledger.num_uses:
            raise RuntimeError(f"requests hold {uses} images, the ledger counts {self.ledger.num_uses}")

    def _make_room(self, nbytes: int, step: ImageStep) -> None:
        dropped = self.ledger.trim(nbytes)
        step.dropped += dropped
        if dropped and step.encode:
            # An image that a request preempted in this very step was to have encoded may be among them.
            step.encode = [image for image in step.encode if image.key not in dropped]
