"""Hand-written fakes of slow parts, and writers of records of runs."""

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
    """Return a completion of ``length`` tokens with the log-probs -0.1, -0.2, ..."""
    tokens = np.arange(first, first + length)
    return Completion(tokens, -0.1 * np.arange(1, length + 1, dtype=np.float32), text, finish)


def group(rewards: Sequence[float], lengths: Sequence[int] | None = None, name: str = "p") -> Group:
    """Return a scored group with one component, `answer`."""
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
    """Return the component of a reward function that gave these values to the completions."""
    array = np.array(values, dtype=np.float64)
    scores = tuple(Score(None if np.isnan(v) else v) for v in array.tolist())
    return Component(array, weight, scores, steps, verdict)


def prompted(count: int) -> list[EncodedProblem]:
    """Return the problems p0, p1, ..., each with its number as the answer."""
    return [
        EncodedProblem(Problem(f"p{i}", f"p{i}", {"answer": str(i)}), np.array([i + 1])) for i in range(count)
    ]


class ScriptedSampler:
    """A sampler that answers with a function of (prompt tokens, stream), in reverse order."""

    def __init__(self, answer: Callable[[np.ndarray, int], str]) -> None:
        self.answer = answer
        self.version = 0
        self.bit_exact = False
        self.samples_on_every_rank = True
        self.streams: list[int] = []
        self.greedy = False
        """Whether the current request is greedy; the function may look at it."""

    def sample(self, requests: Sequence[Request], params: SamplingParams) -> Iterator[SampledCompletion]:
        """Yield the scripted completions, last first."""
        for r in range(len(requests) - 1, -1, -1):
            for s in range(len(requests[r].streams) - 1, -1, -1):
                stream = requests[r].streams[s]
                self.streams.append(stream)
                self.greedy = requests[r].greedy
                yield SampledCompletion(r, s, completion(self.answer(requests[r].prompt, stream)))


def as_stream(records: Iterable[Mapping[str, object]]) -> str:
    """Return records as a log of a run has them, each line with its seal."""
    return "".join(map(sealed_line, records))


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Read the records of a log, without their seals."""
    return [unsealed_line(line) for line in path.read_bytes().splitlines()]


def rewrite_rollouts(
    folder: Path,
    step: int,
    rows: Sequence[Mapping[str, object]],
    arrays: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Replace the rows, or the arrays, of a step in the rollout log, and seal them as anybody could."""
    path = folder / "rollouts" / f"step_{step:06d}.npz"
    if arrays is not None:
        np.savez(path, **arrays)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    path.with_suffix(".jsonl").write_text(as_stream({**row, "arrays": digest} for row in rows))


def rewrite_config(path: Path, old: str, new: str) -> None:
    """Replace a text in a recorded config, and seal the config again."""
    text = unsealed_text(path.read_bytes()).decode()
    assert old in text
    path.write_text(sealed_text(text.replace(old, new)))


def rewrite_evaluations(run: Path, records: Iterable[Mapping[str, object]]) -> None:
    """Replace the evaluations of a run that has ended, as if its result had not sealed them."""
    (run / "evals.jsonl").write_text(as_stream(records))
    result = run / RESULT
    record = {name: value for name, value in unsealed(result.read_bytes()).items() if name != WRITTEN}
    result.write_text(sealed(record))
