"""What can be wrong with rewards and data is found before a model is loaded."""

from __future__ import annotations

from collections.abc import Sequence

from covey.errors import ConfigError, DataError
from covey.rewards.contract import Reward
from covey.rewards.scorer import Rewards, completion_of
from covey.types import Group, Problem

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


def rehearse(problem: Problem, rewards: Rewards) -> Group:
    """Call the rewards on canned completions, so that a broken one fails now. Raises RewardError."""
    canned = [completion_of(""), completion_of("<answer>0</answer>")]
    return rewards.score_group(problem, canned[0].tokens, canned, strict=True)


def check_steps(tried: Group, rewards: Rewards, advantage: str) -> None:
    """Raise ConfigError where steps are to be credited and no reward ever gives any.

    One gives some if it has done so in the rehearsal, or asks where its tokens end (and splits, if it may).
    """
    splits = [r for r in rewards if "token_ends" in r.parameters]
    may = [r for r in splits if "split_by" not in r.parameters or _setting(r, "split_by") is not None]
    if not (tried.steps or may):
        raise ConfigError(
            f"algorithm.advantage {advantage} credits the steps of a completion, and no reward judges steps "
            f"({', '.join(r.name for r in rewards)}). Add one: calculations, step_labels, judge with "
            "split_by, process_reward_model, or your own that returns StepRewards(values, ends); or take "
            "an algorithm without steps, as grpo"
        )


def _setting(reward: Reward, name: str) -> object:
    return reward.settings.get(name, reward.parameters[name].default)
