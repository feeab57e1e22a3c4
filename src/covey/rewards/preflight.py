"""What can be wrong with rewards and data is found before a model is loaded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from covey.errors import DataError
from covey.rewards.scorer import Rewards
from covey.types import Completion, Problem

SHOWN = 5


def check_columns(problems: Sequence[Problem], rewards: Rewards) -> None:
    """Every row has what the rewards ask for. Raises DataError naming row and column."""
    seen: set[tuple[str, ...]] = set()
    for problem in problems:
        columns = tuple(problem.columns)
        if columns in seen:
            continue
        seen.add(columns)
        for reward in rewards:
            if complaint := reward.problem_with(columns):
                raise DataError(
                    f"{problem.id}: reward {reward.name} {complaint}; "
                    f"the row has {', '.join(map(repr, columns)) or 'no columns'}"
                )


def check_golds(
    problems: Sequence[Problem], rewards: Rewards, most: float
) -> tuple[list[Problem], dict[str, str]]:
    """The problems whose golds can be met, and why the others cannot, by id.

    Raises DataError where more than the share ``most`` is bad.
    """
    bad: dict[str, str] = {}
    rows = [p.columns for p in problems]
    for reward in rewards:
        if reward.options.check_golds is not None:
            settings = {k: v for k, v in reward.settings.items() if k != "sandbox"}
            found = reward.options.check_golds(rows, **settings)
            for problem, complaint in zip(problems, found, strict=True):
                if complaint:
                    bad.setdefault(problem.id, f"{reward.name}: {complaint}")
    if len(bad) > most * len(problems):
        first = "".join(f"\n  {row}: {why}" for row, why in list(bad.items())[:SHOWN])
        raise DataError(
            f"{len(bad)} of {len(problems)} rows can never be answered right (scoring.max_bad_golds "
            f"allows {most:.0%}):{first}\nMend these golds, or choose the rule and the reward that fit them"
        )
    return [p for p in problems if p.id not in bad], bad


def rehearse(problem: Problem, rewards: Rewards) -> None:
    """Call the rewards on canned completions, so that a broken one fails now. Raises RewardError."""
    tokens, logprobs = np.zeros(1, np.int64), np.zeros(1, np.float32)
    canned = [Completion(tokens, logprobs, text, "stop") for text in ("", "<answer>0</answer>")]
    rewards.judge(problem, tokens, canned, strict=True)
