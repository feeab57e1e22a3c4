"""The end of pending groups: their scores are awaited, baselines attached, the filter applied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from covey.objective.advantages import running_means
from covey.objective.algorithms import Algorithm
from covey.objective.data import FilterData
from covey.rewards.groups import with_credit, with_label_noise
from covey.rewards.scorer import Scorer
from covey.rollouts.groups import PendingGroup
from covey.types import Baselines, Credit, Group
from covey_verify.errors import CoveyError, DataError


def finish_group(pending: PendingGroup, scorer: Scorer, credit: Credit) -> Group:
    """Wait for a group's scores, and return it as it is trained on. Raises RewardError.

    ``scorer`` is the step's; it is given the calls and seconds of a group that was drawn ahead.
    """
    group_scorer = pending.scoring.scorer
    group = pending.scoring.result()
    greedy = None if pending.greedy is None else finish_group(pending.greedy, group_scorer, credit)
    if group_scorer is not scorer:  # a group drawn ahead has a scorer of its own
        scorer.include(group_scorer.stats)
    rewards = group_scorer.rewards
    if rewards.noise:
        group = with_label_noise(group, rewards.rewards, rewards.noise, pending.request.streams)
    if greedy is not None:
        group = replace(group, baselines=Baselines(greedy_reward=float(greedy.rewards[0])))
    return with_credit(group, credit)


def passes_filter(group: Group, algorithm: Algorithm) -> bool:
    """Whether the step trains on a group. Raises CoveyError for a filter that returns no truth value."""
    scored = group.scorable
    if not scored.any():
        return False
    if algorithm.filter is None:
        return True
    # A filter sees scorable completions only.
    rewards, correct = (torch.from_numpy(values[scored]) for values in (group.rewards, group.correct))
    passes: object = algorithm.filter(FilterData(rewards, correct, group.dead))
    # A user's filter may return a truth value of Python, numpy or torch, but only a single one.
    if not isinstance(passes, bool | np.bool_ | torch.Tensor) or np.asarray(passes).size != 1:
        raise CoveyError(
            f"algorithm.filter {algorithm.filter.name} returns {type(passes).__name__} "
            f"{str(passes)[:60]}, not True or False; problem {group.problem.id}"
        )
    return bool(passes)


def with_running_means(
    groups: list[Group], means: Mapping[str, float], algorithm: Algorithm
) -> tuple[list[Group], Mapping[str, float]]:
    """Attach the running-mean baseline to each completion, if the estimator uses one.

    ``means`` are the earlier ones, by role. Returns the groups and the means after them. Raises DataError.
    """
    if "running_mean" not in algorithm.needs:
        return groups, means
    settings = algorithm.advantage.all_settings  # it has both, or the config was refused
    decay = settings["decay"]
    by = settings["by"]
    new_means = dict(means)
    with_means = []
    for group in groups:
        if by is not None and by not in group.problem.columns:
            raise DataError(
                f"{group.problem.id}: no column {by!r}, which algorithm.advantage.by names; write "
                f"data.columns: {{{by}: ...}} or leave it out"
            )
        # Groups are visited in the order of sampling, which the running means depend on.
        role = "" if by is None else str(group.problem.columns[by])
        before, new_means[role] = running_means(
            torch.from_numpy(group.rewards), new_means.get(role, 0.0), decay
        )
        baselines = replace(group.baselines, running_mean=before.numpy())
        with_means.append(replace(group, baselines=baselines))
    return with_means, new_means
