"""Which completion shows a finding best: how clearly each does, and at which token."""

from __future__ import annotations

from covey.insight.findings.rule import Strength
from covey.objective.signs import lone, mixes_scripts, repeated_windows, shared_prefixes
from covey.types import Group


def was_truncated(group: Group, i: int) -> float:
    """1 for a completion that was truncated."""
    return float(group.completions[i].finish == "length")


def last_token(group: Group, i: int) -> int:
    """The place of the last token."""
    return max(0, len(group.completions[i].tokens) - 1)


def first_of_dead(group: Group, i: int) -> float:
    """1 for the first completion of a dead group."""
    return float(group.dead and i == 0)


def of_status(*statuses: str) -> Strength:
    """1 for a completion to which a reward gave one of these statuses."""
    return lambda group, i: float(any(own[i].status in statuses for own in group.scores.values()))


def reward_of(group: Group, i: int) -> float:
    """What it was paid."""
    return float(group.rewards[i]) if group.scorable[i] else 0.0


def paid_incorrect(group: Group, i: int) -> float:
    """What an incorrect completion was paid."""
    return 0.0 if group.correct[i] else reward_of(group, i)


def long_incorrect(group: Group, i: int) -> float:
    """The length of an incorrect completion."""
    return 0.0 if group.correct[i] else float(len(group.completions[i].tokens))


def mixed(group: Group, i: int) -> float:
    """1 for a completion that mixes scripts."""
    return float(mixes_scripts(group.completions[i].text))


def repeated(group: Group, i: int) -> float:
    """The share of a text that repeats itself."""
    return repeated_windows(group.completions[i].text)


def outlier(group: Group, i: int) -> float:
    """1 for a completion that stands against all others of its group."""
    return float(lone(group) == i)


def near_tie(group: Group, i: int) -> float:
    """Larger the less the rewards of a live group differ."""
    known = group.rewards[group.scorable]
    return 0.0 if group.dead or i else 1.0 / float(known.max() - known.min())


def paid_differently(group: Group, i: int) -> float:
    """1 if a sibling has the same tokens and another reward."""
    own = group.completions[i].tokens.tobytes()
    pairs = zip(group.completions, group.rewards, strict=True)
    return float(any(c.tokens.tobytes() == own and r != group.rewards[i] for c, r in pairs))


def shared_tokens(group: Group, i: int) -> int:
    """How many tokens a completion below the mean shares with a sibling above it."""
    mean = group.rewards[group.scorable].mean() if group.scorable.any() else 0.0
    above = [group.rewards[[j]] - mean for j in range(len(group.completions))]
    return shared_prefixes(group, above).get(i, 0)
