"""The ledger of encoded images: held while needed, bounded when not."""

from __future__ import annotations

import pytest

from mmserve.cache.encoder_ledger import EncodedImage, EncoderLedger


def encoded(ledger: EncoderLedger, key: str, nbytes: int, rows: int = 1) -> EncodedImage:
    entry = ledger.reserve(key, rows)
    ledger.hold(entry)
    ledger.settle(key, nbytes)
    return entry


def test_a_released_image_is_kept_within_the_budget() -> None:
    ledger = EncoderLedger(100)
    entry = encoded(ledger, "a", 60)
    assert (ledger.held_bytes, ledger.total_bytes) == (60, 60)
    ledger.release(entry)
    assert (ledger.held_bytes, ledger.total_bytes) == (0, 60)
    assert ledger.trim() == []
    assert ledger.get("a") is entry


def test_least_recently_used_goes_first_and_held_never() -> None:
    ledger = EncoderLedger(100)
    a, b, c = (encoded(ledger, key, 50) for key in "abc")
    for entry in (a, b):
        ledger.release(entry)
    ledger.hold(a)
    ledger.release(a)
    assert ledger.trim() == ["b"]
    assert ledger.trim(wanted=1000) == ["a"]
    assert "c" in ledger
    assert c.refcount == 1
    ledger.check_integrity()


def test_estimates_follow_the_largest_row_seen() -> None:
    ledger = EncoderLedger(1000)
    assert ledger.estimate(10) == 0
    encoded(ledger, "a", 40, rows=4)
    encoded(ledger, "b", 40, rows=8)
    assert ledger.estimate(10) == 100
    assert ledger.fits(920)
    assert not ledger.fits(921)


def test_a_failed_image_is_gone_at_once_and_its_users_may_still_release_it() -> None:
    ledger = EncoderLedger(100)
    entry = ledger.reserve("a", 1)
    ledger.hold(entry)
    ledger.hold(entry)
    ledger.discard("a")
    assert ledger.get("a") is None
    again = encoded(ledger, "a", 10)
    ledger.release(entry)
    ledger.release(entry)
    ledger.check_integrity()
    assert (again.refcount, ledger.num_uses, ledger.held_bytes) == (1, 1, 10)


def test_misuse_is_refused() -> None:
    ledger = EncoderLedger(100)
    entry = ledger.reserve("a", 1)
    with pytest.raises(RuntimeError, match="nobody holds it"):
        ledger.release(entry)
    with pytest.raises(RuntimeError, match="already in the ledger"):
        ledger.reserve("a", 1)
