"""Stateless random numbers, keyed by seed and position.

There is no generator: a sequence's number at a position is the same in every batch, on every
replica and after every interruption. Imports no torch, because the ingress, which lacks it, derives
seeds, too.

Source: the output function of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number
generators, 2014).
"""

MAX_SEED = 2**63 - 1

_MASK64 = 2**64 - 1


def uniform(seed: int, position: int) -> float:
    """Return the random number for (seed, position), uniform in [0, 1)."""
    return (_mix64(_mix64(seed) + position) >> 11) * 2.0**-53


def derive_seed(seed: int, index: int) -> int:
    """Return the seed of the `index`-th answer to a request; the first answer keeps `seed`.

    Consecutive seeds would collide: answer 1 of seed 7 would equal answer 0 of seed 8.
    """
    # Positions are never negative, so `uniform` uses none of these numbers.
    return seed if index == 0 else _mix64(_mix64(seed) - index) & MAX_SEED


def _mix64(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
