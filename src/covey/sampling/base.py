"""What a sampler is: requests in, completions with the log-prob of every token out."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
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
        """Whether some tokens cannot be drawn, so that log-probs are those of what is left."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)


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


class Weights(Protocol):
    """What a sampler follows: a learner."""

    version: int
    """Optimizer steps that moved the weights."""


class Sampler(Protocol):
    """Anything that can answer requests with completions."""

    version: int
    """Optimizer steps its weights have seen; set by whoever moves them."""

    @property
    def bit_exact(self) -> bool:
        """Whether the log-probs it records are the bits that the trained policy's ``score`` finds."""
        ...

    def sync(self, weights: Weights) -> None:
        """Sample from these weights from now on."""
        ...

    def sample(self, requests: Sequence[Request], params: SamplingParams) -> Iterator[Sampled]:
        """Yield completions as they end, in no particular order."""
        ...


class Moves(NamedTuple):
    """How rows move up when some leave, so that those that stay stand first."""

    sources: list[int]
    targets: list[int]
    left: int
    """How many stay."""

    @classmethod
    def after(cls, leaving: Collection[int], count: int) -> Moves:
        """Of ``count`` rows some leave; rows from the end take their places.

        >>> Moves.after([1, 3], 5)
        Moves(sources=[4], targets=[1], left=3)
        """
        left = count - len(leaving)
        sources = [row for row in range(left, count) if row not in leaving]
        return cls(sources, [row for row in leaving if row < left], left)

    def of(self, rows: Sequence[Row]) -> list[Row]:
        """A list after them.

        >>> Moves.after([1, 3], 5).of("abcde")
        ['a', 'e', 'c']
        """
        after = list(rows)
        for source, target in zip(self.sources, self.targets, strict=True):
            after[target] = rows[source]
        return after[: self.left]
