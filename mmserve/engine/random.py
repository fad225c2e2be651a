"""Random numbers by address: the same (seed, index) gives the same number, in any order and any batch.

SplitMix64 of Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014): its state
advances by a constant, so the index-th output can be computed at once.
"""

from __future__ import annotations

__all__ = ["derive_seed", "uniform"]

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(state: int) -> int:
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) with 53 random bits: number `index` of the sequence that `seed` names."""
    start = _mix((seed + _GOLDEN) & _MASK)  # neighbouring seeds would else give sequences shifted by a step
    return (_mix((start + (index + 1) * _GOLDEN) & _MASK) >> 11) * 2.0**-53


def derive_seed(seed: int, index: int) -> int:
    """A seed below 2**63 for the index-th of several answers to one request; number 0 keeps the request's own."""
    return seed if index == 0 else _mix((seed ^ _mix(index * _GOLDEN & _MASK)) & _MASK) >> 1
