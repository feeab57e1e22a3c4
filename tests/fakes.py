"""Hand-written stand-ins for the slow parts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from covey.runs.folder import RESULT, WRITTEN
from covey.sampling.base import Request, SampledCompletion, SamplingParams
from covey.sampling.prompts import EncodedProblem
from covey.system.integrity import sealed, sealed_line, sealed_text, unsealed, unsealed_line, unsealed_text
from covey.types import Completion, Component, Group, Problem
from covey_verify.types import Score, StepRewards


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
    components = {"answer": component(values, verdict=True)}
    return Group(Problem(name, name), prompt, completions, values, components)


def component(
    values: Sequence[float] | np.ndarray,
    weight: float = 1.0,
    steps: tuple[StepRewards, ...] = (),
    verdict: bool = False,
) -> Component:
    """The part of a reward function that gave each completion one of these values."""
    own = np.array(values, dtype=np.float64)
    scores = tuple(Score(None if np.isnan(v) else v) for v in own.tolist())
    return Component(own, weight, scores, steps, verdict)


def prompted(count: int) -> list[EncodedProblem]:
    """Problems p0, p1, ... whose answer is their number."""
    return [
        EncodedProblem(Problem(f"p{i}", f"p{i}", {"answer": str(i)}), np.array([i + 1])) for i in range(count)
    ]


class ScriptedSampler:
    """Answers every request by a function of (prompt tokens, stream); yields in reverse order."""

    def __init__(self, answer: Callable[[np.ndarray, int], str]) -> None:
        self.answer = answer
        self.version, self.bit_exact, self.samples_on_every_rank = 0, False, True
        self.streams: list[int] = []
        self.greedy = False
        """Whether the likeliest tokens are asked for now; an answer may depend on it."""

    def sample(self, requests: Sequence[Request], params: SamplingParams) -> Iterator[SampledCompletion]:
        """Yield the scripted completions, last first."""
        for r in range(len(requests) - 1, -1, -1):
            for s in range(len(requests[r].streams) - 1, -1, -1):
                stream = requests[r].streams[s]
                self.streams.append(stream)
                self.greedy = requests[r].greedy
                yield SampledCompletion(r, s, completion(self.answer(requests[r].prompt, stream)))


def as_stream(records: Iterable[Mapping[str, object]]) -> str:
    """Records as the logs of a run hold them."""
    return "".join(map(sealed_line, records))


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The records of such a file, without their seals."""
    return [unsealed_line(line) for line in path.read_bytes().splitlines()]


def rewrite_rollouts(
    folder: Path,
    step: int,
    rows: Sequence[Mapping[str, object]],
    arrays: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Let a step of a run's log hold other rows, or arrays, and seal them: as somebody else can."""
    path = folder / "rollouts" / f"step_{step:06d}.npz"
    if arrays is not None:
        np.savez(path, **arrays)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    path.with_suffix(".jsonl").write_text(as_stream({**row, "arrays": digest} for row in rows))


def rewrite_config(path: Path, old: str, new: str) -> None:
    """Change a recorded config, and seal it again."""
    text = unsealed_text(path.read_bytes()).decode()
    assert old in text
    path.write_text(sealed_text(text.replace(old, new)))


def rewrite_evaluations(run: Path, records: Iterable[Mapping[str, object]]) -> None:
    """Let an ended run hold other evaluations, as one that has not sealed them in its result."""
    (run / "evals.jsonl").write_text(as_stream(records))
    result = run / RESULT
    record = {name: value for name, value in unsealed(result.read_bytes()).items() if name != WRITTEN}
    result.write_text(sealed(record))
