"""Keyed randomness: every draw is a function of its key, never of what was drawn before it.

A stream of uniforms belongs to a key such as (seed, step, problem, sample); its t-th number is a
hash of (key, t). So batch composition, order, retries and restarts cannot change any draw, and
nothing about random state needs to be saved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""The increment of SplitMix64: 2^64 over the golden ratio, made odd."""
_DROP = np.uint64(41)
"""Low bits that are dropped; the 23 that remain are exact in float32."""


def key(*parts: int | str) -> int:
    """A 64-bit key from any mix of numbers and names.

    >>> key(0, "train", 7) == key(0, "train", 7), key(0, "train", 7) == key(0, "train", 8)
    (True, False)
    """
    # The unit separator keeps ("a", "bc") and ("ab", "c") apart; repr keeps 7 and "7" apart.
    digest = hashlib.blake2b("\x1f".join(map(repr, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def uniforms(stream: int, count: int, start: int = 0) -> np.ndarray:
    """Numbers ``start`` .. ``start + count`` of the key's stream: (count,) float32 in [0, 1).

    SplitMix64 (Steele, Lea, Flood 2014); only the top 23 bits are used, so that u * total < total in float32.

    >>> a, b = uniforms(key("x"), 8), uniforms(key("x"), 4, start=4)
    >>> bool((a[4:] == b).all())
    True
    """
    return uniforms_of([stream], count, [start])[0]


def uniforms_of(streams: Sequence[int], count: int, starts: Sequence[int]) -> np.ndarray:
    """The uniforms of several keys, each from a start of its own: (n, count)."""
    # SplitMix64 adds its increment before it mixes, so number t has the counter t + 1.
    first = np.array(starts, dtype=np.uint64)[:, None] + np.uint64(1)
    counter = first + np.arange(count, dtype=np.uint64)
    with np.errstate(over="ignore"):  # its arithmetic is modulo 2^64
        z: np.ndarray = np.array(streams, dtype=np.uint64)[:, None] + counter * _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return (z >> _DROP).astype(np.float32) * np.float32(2.0**-23)


def permutation(stream: int, count: int) -> np.ndarray:
    """A permutation of range(count), the order of an epoch, from its key. (count,) int64."""
    return np.random.Generator(np.random.PCG64(stream)).permutation(count)
