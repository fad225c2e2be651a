"""The tiny models of a source checkout. They are built by `fixtures/`, which is not part of an installed package."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import mmserve
from mmserve.errors import ConfigError

if TYPE_CHECKING:
    from mmserve.conformance.subject import Subject

__all__ = ["checkout", "family_names", "family_subject", "known_families"]


def checkout() -> Path | None:
    """The root of the source checkout that this package is imported from; None for an installed wheel."""
    root = Path(mmserve.__file__).parents[1]
    return root if (root / "fixtures" / "tiny_models").is_dir() else None


def family_names() -> tuple[str, ...]:
    """Every family that there is a tiny model of, in order. Raises ConfigError outside of a checkout."""
    return tuple(sorted(_subjects()))


def family_subject(name: str, folder: Path) -> Subject:
    """Write the family's tiny model to `folder` and say how to compare it.

    Raises:
        ConfigError: There is no such family, it needs a library that is not installed, or this is no checkout.
    """
    known_families((name,))
    try:
        return _subjects()[name](folder)
    except ImportError as error:
        raise ConfigError(f"the tiny model of {name!r} needs what is not installed here: {error}") from error


def known_families(names: Sequence[str]) -> tuple[str, ...]:
    """`names`, each of which there is a tiny model of. Raises ConfigError, which lists them, for any other."""
    known = family_names()
    for name in names:
        if name not in known:
            raise ConfigError(f"there is no tiny model of {name!r}; known: {', '.join(known)}")
    return tuple(names)


def _subjects() -> dict[str, Callable[[Path], Subject]]:
    if checkout() is None:
        raise ConfigError(
            "the tiny models of families are built by fixtures/ of the source checkout, and this is an installed "
            "package without it: run from a checkout, or name a model folder of your own with --model"
        )
    subjects: dict[str, Callable[[Path], Subject]] = importlib.import_module("fixtures.tiny_models.subjects").SUBJECTS
    return subjects
