"""Scores of how clearly a completion shows a finding, and the token that shows it."""

from __future__ import annotations

from covey.insight.findings.rule import Strength
from covey.objective.signs import lone, mixes_scripts, repeated_windows, shared_prefixes
from covey.types import Group


def was_truncated(group: Group, i: int) -> float:
    """Return 1 for a truncated completion."""
    return float(group.completions[i].finish == "length")


def last_token(group: Group, i: int) -> int:
    """Return the index of the last token."""
    return max(0, len(group.completions[i].tokens) - 1)


def first_of_dead(group: Group, i: int) -> float:
    """Return 1 for the first completion of a dead group."""
    return float(group.dead and i == 0)


def of_status(*statuses: str) -> Strength:
    """Return a score that is 1 for a completion to which a reward gave one of these statuses."""
    return lambda group, i: float(any(c.scores[i].status in statuses for c in group.components.values()))


def reward_of(group: Group, i: int) -> float:
    """Return the reward of a completion; 0 without one."""
    return float(group.rewards[i]) if group.scorable[i] else 0.0


def paid_incorrect(group: Group, i: int) -> float:
    """Return the reward of an incorrect completion; 0 for a correct one."""
    return 0.0 if group.correct[i] else reward_of(group, i)


def long_incorrect(group: Group, i: int) -> float:
    """Return the length of an incorrect completion; 0 for a correct one."""
    return 0.0 if group.correct[i] else float(len(group.completions[i].tokens))


def mixed_scripts(group: Group, i: int) -> float:
    """Return 1 for a completion that mixes scripts."""
    return float(mixes_scripts(group.completions[i].text))


def repeated_fraction(group: Group, i: int) -> float:
    """Return the fraction of a text that repeats itself."""
    return repeated_windows(group.completions[i].text)


def outlier(group: Group, i: int) -> float:
    """Return 1 for a completion whose reward differs from the rewards of all its siblings."""
    return float(lone(group) == i)


def near_tie(group: Group, i: int) -> float:
    """Return the inverse of the range of rewards, for the first completion of a live group."""
    if group.dead or i > 0:
        return 0.0
    rewards = group.rewards[group.scorable]
    return 1.0 / float(rewards.max() - rewards.min())


def paid_differently(group: Group, i: int) -> float:
    """Return 1 if a sibling has the same tokens and another reward."""
    tokens = group.completions[i].tokens.tobytes()
    reward = group.rewards[i]
    siblings = zip(group.completions, group.rewards, strict=True)
    return float(any(c.tokens.tobytes() == tokens and r != reward for c, r in siblings))


def shared_tokens(group: Group, i: int) -> int:
    """Return how many tokens a completion below the mean shares with a sibling above it."""
    mean = group.rewards[group.scorable].mean() if group.scorable.any() else 0.0
    above = [group.rewards[[j]] - mean for j in range(len(group.completions))]
    return shared_prefixes(group, above).get(i, 0)
