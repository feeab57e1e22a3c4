"""What can be wrong with rewards and data is found before a model is loaded."""

from __future__ import annotations

from collections.abc import Sequence

from covey.errors import DataError
from covey.rewards.scorer import Rewards, completion_of
from covey.types import Problem

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


def check_references(
    problems: Sequence[Problem], rewards: Rewards, most: float
) -> tuple[list[Problem], dict[str, str]]:
    """The problems whose reference answers can be met, and why the others cannot, by id.

    Raises DataError where more than the fraction ``most`` is bad.
    """
    bad: dict[str, str] = {}
    rows = [p.columns for p in problems]
    for reward in rewards:
        if reward.options.check_references is not None:
            found = reward.options.check_references(rows, **reward.plain_settings)
            for problem, complaint in zip(problems, found, strict=True):
                if complaint:
                    bad.setdefault(problem.id, f"{reward.name}: {complaint}")
    if len(bad) > most * len(problems):
        first = "".join(f"\n  {row}: {why}" for row, why in list(bad.items())[:SHOWN])
        raise DataError(
            f"{len(bad)} of {len(problems)} rows can never be answered correctly (scoring.max_bad_references "
            f"allows {most:.0%}):{first}\nMend these reference answers, or choose the rule and the "
            "reward that fit them"
        )
    return [p for p in problems if p.id not in bad], bad


def rehearse(problem: Problem, rewards: Rewards) -> None:
    """Call the rewards on canned completions, so that a broken one fails now. Raises RewardError."""
    canned = [completion_of(""), completion_of("<answer>0</answer>")]
    rewards.score_group(problem, canned[0].tokens, canned, strict=True)
