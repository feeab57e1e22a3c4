"""Hand-written stand-ins for the slow parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from covey.prompts import Prompted
from covey.sampling.base import Request, Sampled, SamplingParams
from covey.types import Completion, Group, Problem


def completion(text: str = "x", length: int = 3, finish: str = "stop", first: int = 10) -> Completion:
    """A completion of some tokens with log-probs -0.1, -0.2, ..."""
    tokens = np.arange(first, first + length)
    return Completion(tokens, -0.1 * np.arange(1, length + 1, dtype=np.float32), text, finish)


def group(rewards: Sequence[float], lengths: Sequence[int] | None = None, name: str = "p") -> Group:
    """A scored group with one component called `answer`."""
    lengths = lengths or [3] * len(rewards)
    values = np.array(rewards, dtype=np.float64)
    completions = tuple(completion(f"{name}{i}", n) for i, n in enumerate(lengths))
    prompt = np.array([1, 2, 3])
    components, weights = {"answer": values}, {"answer": 1.0}
    return Group(Problem(name, name), prompt, completions, values, components, weights, verdict="answer")


def prompted(count: int) -> list[Prompted]:
    """Problems p0, p1, ... whose answer is their number."""
    return [Prompted(Problem(f"p{i}", f"p{i}", {"answer": str(i)}), np.array([i + 1])) for i in range(count)]


class ScriptedSampler:
    """Answers every request by a function of (prompt tokens, stream); yields in reverse order."""

    def __init__(self, answer: Callable[[np.ndarray, int], str]) -> None:
        self.answer = answer
        self.version, self.bit_exact, self.shares = 0, False, True
        self.streams: list[int] = []
        self.greedy = False
        """Whether the likeliest tokens are asked for now; an answer may depend on it."""

    def sample(self, requests: Sequence[Request], params: SamplingParams) -> Iterator[Sampled]:
        """Yield the scripted completions, last first."""
        for r in range(len(requests) - 1, -1, -1):
            for s in range(len(requests[r].streams) - 1, -1, -1):
                stream = requests[r].streams[s]
                self.streams.append(stream)
                self.greedy = requests[r].greedy
                yield Sampled(r, s, completion(self.answer(requests[r].prompt, stream)))
