"""Keyed randomness; docs/reliability.md describes it."""

from __future__ import annotations

import hashlib

import numpy as np


def stream_key(*parts: int | str) -> int:
    """Return blake2b over the parts' reprs, joined by the unit separator: 8 bytes, little-endian."""
    text = "\x1f".join(map(repr, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def splitmix_uniforms(stream: int, count: int) -> np.ndarray:
    """Return the first numbers of a key's stream: top 23 bits of SplitMix64, (count,) float32 in [0, 1)."""
    words = 1 << 64
    uniforms = np.zeros(count, np.float32)
    for t in range(count):
        z = (stream + (t + 1) * 0x9E3779B97F4A7C15) % words
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % words
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % words
        uniforms[t] = ((z ^ (z >> 31)) >> 41) * 2.0**-23
    return uniforms
