"""What a sampler is: requests in, completions with the log-prob of every token out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from covey.types import Completion

Row = TypeVar("Row")


@dataclass(frozen=True)
class SamplingParams:
    """How completions are drawn."""

    max_tokens: int = 512
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Keep the smallest set of tokens that holds this probability."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    stop: tuple[str, ...] = ()
    """A completion ends with the token that completes one of these strings."""

    @property
    def truncates(self) -> bool:
        """Whether some tokens can never be drawn, so that log-probs are renormalised."""
        return self.top_p < 1 or self.top_k > 0


@dataclass(frozen=True)
class Request:
    """One prompt and the random streams of the completions wanted for it."""

    prompt: np.ndarray
    """(P,) int64 token ids."""
    streams: Sequence[int]
    """One key per completion: its t-th token is drawn with the t-th uniform of this key."""


class Sampled(NamedTuple):
    """A finished completion and the request it answers."""

    request: int
    sample: int
    completion: Completion


class Sampler(Protocol):
    """Anything that can answer requests with completions; ``version`` names its weights."""

    version: int

    def sample(self, requests: Sequence[Request], params: SamplingParams) -> Iterator[Sampled]:
        """Yield completions as they end, in no particular order."""
        ...


def shifted(rows: Sequence[Row], sources: Sequence[int], targets: Sequence[int], left: int) -> list[Row]:
    """The first ``left`` rows after rows have moved.

    >>> shifted("abcde", [4], [1], 3)
    ['a', 'e', 'c']
    """
    after = list(rows)
    for source, target in zip(sources, targets, strict=True):
        after[target] = rows[source]
    return after[:left]
