"""Checks of the size of advantages, which hold under any convention."""

from __future__ import annotations

import math

import torch

from covey.audit.checks.check import Fault
from covey.audit.checks.conventions import has_critic
from covey.audit.checks.rollout_scores import MIN_COMPLETIONS, ScoredRollout, scored_rollouts
from covey.audit.record import AuditRecord
from covey.objective.data import rows_of_groups

HUGE_RANGES = 50
"""Times the range of rewards: neither a baseline nor the std of a group makes advantages so large."""
MIN_ROLLOUTS = 2
"""Fewest rollouts of which "most" is said."""
MIN_GROUPS = 4
"""Fewest groups of which a fraction is said."""
SMALL_PART = 0.01
"""Part of the run's range of rewards below which a difference hardly matters."""
ROUNDING = 1e-3
"""Part of that below which a difference is float32's rounding."""
LARGE = 0.5
"""An advantage of a completion that clearly differs from its group."""
ROOM = 0.1
"""Part of the range of rewards by which a baseline may lie beyond them."""


def advantages_are_huge(record: AuditRecord) -> Fault | None:
    """An advantage is larger than fifty times the range of its rollout's rewards, with any KL in them, and
    larger than division by the std of so many completions allows.
    """
    for rollout in map(ScoredRollout.trained, scored_rollouts(record)):
        rewards = torch.cat([rollout.rewards, rollout.rewards - rollout.kl])
        bound = max(HUGE_RANGES * float(rewards.max() - rewards.min()), len(rewards) ** 0.5)
        worst = int(rollout.used.abs().argmax())
        if len(rollout.used) >= MIN_COMPLETIONS and bound < float(rollout.used[worst].abs()) < math.inf:
            lowest, highest = float(rollout.rewards.min()), float(rollout.rewards.max())
            sentence = (
                f"an advantage is {float(rollout.used[worst]):.4g} for rewards from {lowest:g} to {highest:g}"
            )
            evidence = {"group": int(rollout.group[worst]), "completion": rollout.places[worst]}
            return Fault(sentence, rollout.step, evidence)
    return None


def baseline_is_beyond_the_rewards(record: AuditRecord) -> Fault | None:
    """In more than half of the rollouts, and in at least two, the advantages are the rewards minus a number
    that lies outside the range of 0 and all rewards so far, by a tenth of that range. Runs with a critic are
    not judged.
    """
    if has_critic(record):
        return None
    judged = 0
    beyond = list[tuple[ScoredRollout, float]]()
    rewards = torch.zeros(1, dtype=torch.float64)
    for rollout in map(ScoredRollout.trained, scored_rollouts(record)):
        rewards = torch.cat([rewards, rollout.rewards])
        low, high = float(rewards.min()), float(rewards.max())
        baselines = rollout.rewards - rollout.used
        room = ROOM * (high - low)
        # Advantages with a std, of groups or with a critic have no common baseline.
        if len(baselines) < MIN_COMPLETIONS or float(baselines.max() - baselines.min()) > 1e-4 * (high - low):
            continue
        judged += 1
        if not low - room <= float(baselines[0]) <= high + room:
            beyond.append((rollout, float(baselines[0])))
    if len(beyond) < MIN_ROLLOUTS or len(beyond) <= 0.5 * judged:
        return None
    rollout, baseline = beyond[-1]
    sentence = f"the baseline is {baseline:.4g} in step {rollout.step + 1}, where rewards so far lie between"
    return Fault(f"{sentence} {float(rewards.min()):.4g} and {float(rewards.max()):.4g}", beyond[0][0].step)


def noise_is_amplified(record: AuditRecord) -> Fault | None:
    """In more than a quarter of the groups whose rewards differ, and at least four, the differences are less
    than a hundredth of the run's range of rewards, yet an advantage is above .5.
    """
    rollouts = [rollout.trained() for rollout in scored_rollouts(record)]
    rewards = torch.cat([rollout.rewards for rollout in rollouts] or [torch.zeros(1)])
    small = SMALL_PART * float(rewards.max() - rewards.min())
    spread = 0
    amplified = list[tuple[ScoredRollout, int]]()
    for rollout in rollouts:
        for number, rows in rows_of_groups(rollout.group):
            width = float(rollout.rewards[rows].max() - rollout.rewards[rows].min())
            spread += width > ROUNDING * small
            if ROUNDING * small < width < small and float(rollout.used[rows].abs().max()) > LARGE:
                amplified.append((rollout, number))
    if len(amplified) < MIN_GROUPS or len(amplified) <= 0.25 * spread:
        return None
    rollout, number = amplified[0]
    sentence = f"in {len(amplified)} of {spread} groups rewards differ by less than {small:.2g}"
    return Fault(f"{sentence}, which the std makes a full advantage", rollout.step, {"group": number})


CHECKS = {
    "noise_amplified": noise_is_amplified,
    "advantages_huge": advantages_are_huge,
    "baseline_beyond": baseline_is_beyond_the_rewards,
}
