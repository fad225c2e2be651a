"""Whether two hosts hold the same checkpoint, without reading all of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from mmserve.model.checkpoint import open_checkpoint

__all__ = ["differences", "fingerprint"]

_SAMPLES: Final = 32
_SAMPLE: Final = 64 * 1024


def fingerprint(folder: Path, *, allow_pickled: bool = False) -> dict[str, str]:
    """Name of each file that a model is made from -> a digest of it.

    config.json counts as a whole; a weight file by its size and 32 pieces of 64 KiB from its first byte (names and
    shapes) to its last, so that two trainings of one model differ.

    Raises:
        ModelLoadError: As `open_checkpoint`.
    """
    checkpoint = open_checkpoint(folder, allow_pickled=allow_pickled)
    files = (folder / "config.json", *checkpoint.files)
    return {str(file.relative_to(folder)): _digest(file) for file in files}


def differences(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """Files that only one side has, or that are not alike."""
    return sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))


def _digest(file: Path) -> str:
    size = file.stat().st_size
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    with file.open("rb") as stream:
        if size <= _SAMPLES * _SAMPLE:
            digest.update(stream.read())
        else:
            for i in range(_SAMPLES):
                stream.seek(i * (size - _SAMPLE) // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE))
    return digest.hexdigest()
