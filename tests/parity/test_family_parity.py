"""Every family that we have a tiny model of: the tokens and log-probabilities of `generate()`, in packed chunks."""

from __future__ import annotations

from pathlib import Path

import pytest

from fixtures.tiny_models.conformance import Case
from fixtures.tiny_models.families import FAMILIES
from mmserve.conformance.report import mapped_types
from mmserve.model.proven import PROVEN
from mmserve.model.refused import REFUSED


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_family(name: str, tmp_path: Path) -> None:
    case = Case(FAMILIES[name], tmp_path)
    case.compare(new_tokens=4, chunk=3, stagger=1, warm=True)
    if case.family.image is not None:
        assert (case.model.describe()["path"] == "paged") == (name in PROVEN)


def test_every_family_on_the_packed_path_is_proven_here() -> None:
    assert {name for name in PROVEN if name not in FAMILIES} == set()


def test_every_type_of_the_image_text_mapping_is_compared_here_or_refused_by_name() -> None:
    assert {name for name in mapped_types() if (name in FAMILIES) == (name in REFUSED)} == set()
