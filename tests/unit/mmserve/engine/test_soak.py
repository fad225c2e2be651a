"""The soak in short; `make soak` runs it long."""

from __future__ import annotations

import pytest
from soak import one_round


@pytest.mark.parametrize("seed", range(8))
def test_every_request_is_as_if_it_were_alone_and_nothing_is_left(seed: int) -> None:
    tally = one_round(seed, count=24)
    assert tally["answered"] > 8
