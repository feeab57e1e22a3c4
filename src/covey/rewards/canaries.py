"""Whether rewards can still be trusted, asked in every step, and what the step's scores add up to.

A canary is a completion whose reward is known. A verifier that pays an incorrect one, or no longer pays
a correct one, has been taken over or has broken; training against it would be worse than stopping.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from covey.errors import RewardError
from covey.rewards.contract import FULL, Reward
from covey.rewards.scorer import Scorer
from covey.types import Group, Problem

PATIENCE = 3
WINDOW = 5
"""Steps over which scores that could not be made are counted."""
Failures = Sequence[tuple[int, int]]
"""Of the last steps: scores that could not be made, and all scores."""


def ask_canaries(scorer: Scorer, problem: Problem, refused: Mapping[str, int]) -> dict[str, int]:
    """Ask each verifier about a correct and an incorrect completion of a problem.

    ``refused`` says how often in a row each has refused a correct one before; returned is how often by
    now. Raises RewardError if one pays the incorrect one, or refuses the correct one PATIENCE times in a
    row: once may be the row's fault. Scores that could not be made say nothing.
    """
    counts = dict(refused)
    for reward in scorer.rewards:
        for kind, text in canaries(reward, problem):
            score = scorer.score(reward, problem, text)
            if score.value is None:
                continue
            if kind == "correct":
                counts[reward.name] = counts.get(reward.name, 0) + 1 if score.value < FULL else 0
            if (kind == "incorrect" and score.value > 0) or counts.get(reward.name, 0) >= PATIENCE:
                raise reward.broken(
                    problem,
                    f"gives {score.value:g} ({score.status}) to a completion known to be {kind}: "
                    f"{text[:200]!r}. The verifier cannot be trusted, so training stops",
                )
    return counts


def canaries(reward: Reward, problem: Problem) -> Iterator[tuple[str, str]]:
    """(`correct` or `incorrect`, completion) for a reward that says what must and must not be paid."""
    makers = {"correct": reward.options.example, "incorrect": reward.options.counterexample}
    for kind, make in makers.items():
        text = make(problem.columns, **reward.plain_settings) if make is not None else None
        if text is not None and not reward.options.format_only:
            yield kind, text


def count_failures(
    before: Failures, groups: Sequence[Group], max_infra: float, window: int = WINDOW
) -> list[tuple[int, int]]:
    """The failures of the last ``window`` steps, this one included.

    Raises RewardError if scorer fails too often: in all of a step, or in more than the fraction
    ``max_infra`` of a full window.
    """
    scores = [s for g in groups for own in g.scores.values() for s in own]
    failures = [s for s in scores if s.status == "infra_error"]
    recent = [*before, (len(failures), len(scores))][-window:]
    failed, total = (sum(column) for column in zip(*recent, strict=True))
    often = len(recent) == window and failed > max_infra * total
    if failures and (len(failures) == len(scores) or often):
        raise RewardError(
            f"{failed} of {total} scores of the last {len(recent)} steps could not be made "
            f"(scoring.max_infra {max_infra:g}); the last one: {failures[-1].detail or '?'}"
        )
    return recent


def score_metrics(groups: Sequence[Group], logged: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Fractions of each reward's statuses other than `ok`, means of its metrics, and what users logged."""
    metrics: dict[str, float] = {}
    for name in groups[0].scores:
        scores = [score for group in groups for score in group.scores[name]]
        statuses = Counter(s.status for s in scores if s.status != "ok")
        metrics |= {f"reward/{name}/{status}": n / len(scores) for status, n in sorted(statuses.items())}
        for metric in sorted({m for s in scores for m in s.metrics}):
            values = [s.metrics[metric] for s in scores if metric in s.metrics]
            metrics[f"reward/{name}/{metric}"] = float(np.mean(values))
    return metrics | {f"user/{name}": float(np.mean(v)) for name, v in sorted(logged.items()) if v}
