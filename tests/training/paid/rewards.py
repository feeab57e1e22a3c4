"""Rewards of the tests' runs, alone in their folder and without imports.

A run hashes all modules beside a reward, and the process in which a reward runs imports its file.
"""

from __future__ import annotations


def varied(completion: str) -> float:
    """Return what differs between completions, whatever they say, so that every run learns."""
    return len(completion) + sum(map(ord, completion)) % 7


def odd(completion: str | list[dict[str, str]]) -> float:
    """Return 1 for half of all texts, whatever they say."""
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    return sum(map(ord, text)) % 2


def nothing(completion: str) -> float:
    """Return 0: no completion is correct."""
    return 0.0
