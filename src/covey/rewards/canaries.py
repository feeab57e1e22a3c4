"""What is asked of the verifiers themselves, in every step, and what the step's verdicts add up to.

A canary is a completion whose reward is known. A verifier that pays a wrong one, or no longer pays
a right one, has been taken over or has broken; training against it would be worse than stopping.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from covey.rewards.contract import Reward
from covey.rewards.scorer import Rewards
from covey.types import Group, Problem

FULL = 1.0 - 1e-9
PATIENCE = 3


def watch(rewards: Rewards, groups: Sequence[Group]) -> None:
    """Ask each verifier about a right and a wrong completion of one of the step's problems.

    Raises RewardError if one pays the wrong one, or refuses the right one PATIENCE times in a row: once
    may be the row's fault. Verdicts that could not be made say nothing.
    """
    problem = groups[rewards.trainer_state.global_step % len(groups)].problem
    for reward in rewards:
        for name, text in canaries(reward, problem):
            score = rewards.ask(reward, problem, text)
            if score.value is None:
                continue
            if name == "right":
                refused = score.value < FULL
                rewards.refused[reward.name] = rewards.refused.get(reward.name, 0) + 1 if refused else 0
            if (name == "wrong" and score.value > 0) or rewards.refused.get(reward.name, 0) >= PATIENCE:
                raise reward.broken(
                    problem,
                    f"gives {score.value:g} ({score.status}) to a completion known to be {name}: "
                    f"{text[:200]!r}. The verifier cannot be trusted, so training stops",
                )


def canaries(reward: Reward, problem: Problem) -> Iterator[tuple[str, str]]:
    """(`right` or `wrong`, completion) for a reward that says what must and must not be paid."""
    settings = {k: v for k, v in reward.settings.items() if k != "sandbox"}
    for name, make in (("right", reward.options.example), ("wrong", reward.options.wrong)):
        text = make(problem.columns, **settings) if make is not None else None
        if text is not None and not reward.options.shape:
            yield name, text


def verdict_metrics(groups: Sequence[Group], logged: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Shares of each reward's statuses other than `ok`, means of its parts, and what users logged."""
    metrics: dict[str, float] = {}
    for name in groups[0].scores:
        scores = [score for group in groups for score in group.scores[name]]
        statuses = Counter(s.status for s in scores if s.status != "ok")
        metrics |= {f"reward/{name}/{status}": n / len(scores) for status, n in sorted(statuses.items())}
        for part in sorted({p for s in scores for p in s.parts}):
            values = [s.parts[part] for s in scores if part in s.parts]
            metrics[f"reward/{name}/{part}"] = float(np.mean(values))
    return metrics | {f"user/{name}": float(np.mean(v)) for name, v in sorted(logged.items()) if v}
