"""Which encoded images exist, how large they are, and who still needs them. No tensors.

The runner holds the rows; this ledger decides. An entry that a request still needs is held. One that nobody
needs is kept for the next question about the same image, least recently used out first::

    reserve     (absent) -> present, size estimated from the images seen so far
    settle      the encoder ran: the true size
    hold        one more request needs it          release     one fewer
    trim        unneeded entries -> gone, oldest first, until all fits the budget

Rows in use may exceed the budget only by what one request needs at once, and only when nobody else holds any:
so an image larger than the whole budget is still answered, and the engine never waits for itself.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

__all__ = ["EncodedImage", "EncoderLedger"]


@dataclass(eq=False, slots=True)
class EncodedImage:
    """One image's entry.

    Attributes:
        key: Content key.
        num_rows: Feature rows.
        nbytes: Storage of its rows; an estimate until settled.
        refcount: Uses by requests that have not computed all of its tokens yet.
        alive: False once its encoding failed; then it is found no more and goes with its last user.
    """

    key: str
    num_rows: int
    nbytes: int
    refcount: int = 0
    alive: bool = True


class EncoderLedger:
    """Entries by content key.

    Args:
        capacity: Bytes of rows to keep.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._entries: dict[str, EncodedImage] = {}
        self._unused: OrderedDict[str, EncodedImage] = OrderedDict()
        self._num_uses = 0
        self._held_bytes = 0
        self._unused_bytes = 0
        self._bytes_per_row = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    @property
    def held_bytes(self) -> int:
        """Bytes that requests need now."""
        return self._held_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all entries."""
        return self._held_bytes + self._unused_bytes

    @property
    def num_uses(self) -> int:
        """Uses of all entries together, failed ones that are still held included."""
        return self._num_uses

    def get(self, key: str) -> EncodedImage | None:
        """The entry of `key`, or None."""
        return self._entries.get(key)

    def estimate(self, num_rows: int) -> int:
        """Bytes that an image of `num_rows` rows may take: the most a row has taken so far."""
        return int(num_rows * self._bytes_per_row)

    def fits(self, nbytes: int) -> bool:
        """Whether `nbytes` more can be held beside what requests need now."""
        return self._held_bytes + nbytes <= self.capacity

    def reserve(self, key: str, num_rows: int) -> EncodedImage:
        """Make an entry for an image that is encoded in this step; nobody holds it yet.

        Raises:
            RuntimeError: There is one already.
        """
        if key in self._entries:
            raise RuntimeError(f"image {key!r} is already in the ledger")
        entry = EncodedImage(key, num_rows, self.estimate(num_rows))
        self._entries[key] = entry
        self._unused[key] = entry
        self._unused_bytes += entry.nbytes
        return entry

    def settle(self, key: str, nbytes: int) -> None:
        """Record the true size of an image that was encoded."""
        entry = self._entries[key]
        if entry.refcount:
            self._held_bytes += nbytes - entry.nbytes
        else:
            self._unused_bytes += nbytes - entry.nbytes
        entry.nbytes = nbytes
        self._bytes_per_row = max(self._bytes_per_row, nbytes / max(1, entry.num_rows))

    def hold(self, entry: EncodedImage) -> None:
        """One more use of `entry`."""
        if entry.refcount == 0:
            del self._unused[entry.key]
            self._unused_bytes -= entry.nbytes
            self._held_bytes += entry.nbytes
        entry.refcount += 1
        self._num_uses += 1

    def release(self, entry: EncodedImage) -> None:
        """One use of `entry` less.

        Raises:
            RuntimeError: It has none.
        """
        if entry.refcount == 0:
            raise RuntimeError(f"image {entry.key!r} was released but nobody holds it")
        entry.refcount -= 1
        self._num_uses -= 1
        if entry.refcount or not entry.alive:
            return
        self._held_bytes -= entry.nbytes
        self._unused_bytes += entry.nbytes
        self._unused[entry.key] = entry

    def discard(self, key: str) -> None:
        """The encoding of `key` failed: it has no rows."""
        entry = self._entries.pop(key)
        entry.alive = False
        if entry.refcount:
            self._held_bytes -= entry.nbytes
        else:
            del self._unused[key]
            self._unused_bytes -= entry.nbytes

    def trim(self, wanted: int = 0) -> list[str]:
        """Drop unused entries, oldest first, until `wanted` more bytes fit (or none is left); returns their keys."""
        dropped = []
        while self._unused and self.total_bytes + wanted > self.capacity:
            key, entry = self._unused.popitem(last=False)
            self._unused_bytes -= entry.nbytes
            del self._entries[key]
            dropped.append(key)
        return dropped

    def check_integrity(self) -> None:
        """Counts and sums agree with the entries.

        Raises:
            RuntimeError: With the first contradiction found.
        """
        held = sum(e.nbytes for e in self._entries.values() if e.refcount)
        unused = sum(e.nbytes for e in self._entries.values() if not e.refcount)
        if (held, unused) != (self._held_bytes, self._unused_bytes):
            raise RuntimeError(
                f"{held} held and {unused} unused bytes, counted as {self._held_bytes} and {self._unused_bytes}"
            )
        if {key for key, e in self._entries.items() if not e.refcount} != self._unused.keys():
            raise RuntimeError("the list of unused images differs from the entries without users")
