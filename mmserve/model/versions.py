"""What each feature needs of the libraries under us, checked with a message that says what to do.

The requirements in the package's metadata say the same, but an environment can hold anything: `pip` warns of a
conflict and installs. The check reads versions from metadata and imports nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata, util
from typing import Any, Final

from packaging.version import InvalidVersion, Version

from mmserve.errors import UnsupportedModelError

__all__ = ["LOADING", "PACKED", "Requirement", "newer_than_installed", "require", "require_library_of"]


@dataclass(frozen=True, slots=True)
class Requirement:
    """A feature, and the least version of each library that it needs."""

    feature: str
    versions: Mapping[str, str]


LOADING: Final = Requirement(
    "loading a model (transformers' conversions of old weight layouts)", {"transformers": "5.24", "torch": "2.10"}
)
PACKED: Final = Requirement(
    "the packed path (transformers' attention and mask interfaces)", {"transformers": "5.24", "torch": "2.10"}
)


_LIBRARIES: Final = dict.fromkeys(
    ("fast_vlm", "gemma3n", "gemma3n_text", "perception_lm", "timm_backbone", "timm_wrapper"), "timm"
)
"""Architectures, whole or part of another, and the library that transformers takes them from."""


def require_library_of(model_type: str) -> None:
    """Raise UnsupportedModelError if an architecture needs a library that is not installed."""
    library = _LIBRARIES.get(model_type)
    if library is not None and util.find_spec(library) is None:
        raise UnsupportedModelError(
            f"{model_type!r} needs {library}, which is not installed: pip install 'mmserve[{library}]'"
        )


def require(requirement: Requirement) -> None:
    """Raise UnsupportedModelError if a library is missing or older than `requirement` says."""
    for library, least in requirement.versions.items():
        try:
            found = metadata.version(library)
        except metadata.PackageNotFoundError:
            raise UnsupportedModelError(
                f"{requirement.feature} needs {library} {least} or newer, and it is not installed: "
                f"pip install '{library}>={least}'"
            ) from None
        if Version(found) < Version(least):
            raise UnsupportedModelError(
                f"{requirement.feature} needs {library} {least} or newer, and {found} is installed: "
                f"pip install -U '{library}>={least}'"
            )


def newer_than_installed(config: Mapping[str, Any]) -> str | None:
    """The version of transformers that wrote a config.json, if that is newer than the one installed."""
    try:
        written = Version(str(config.get("transformers_version")))
        return str(written) if written > Version(metadata.version("transformers")) else None
    except (InvalidVersion, metadata.PackageNotFoundError):
        return None
