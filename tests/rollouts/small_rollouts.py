"""Rollouts of small groups over given problems."""

from __future__ import annotations

from covey.config.algorithm import build_algorithm
from covey.config.sampling import Rollout
from covey.rewards.loading import load_rewards
from covey.rollouts.batch import BEGINNING
from covey.rollouts.loop import Rollouts


def quiet(done: int, total: int) -> None:
    assert 0 <= done <= total


def rollouts(
    sampler, problems, algorithm="dapo", seed=0, first_step=0, position=BEGINNING, progress=quiet, **settings
) -> Rollouts:
    rewards = load_rewards([{"exact_answer": {"rule": "whole"}}], None)
    config = Rollout(**{"group_size": 4, "prompts_per_step": 3, "max_tokens": 8, **settings})
    return Rollouts(
        problems,
        sampler,
        rewards,
        config,
        build_algorithm(algorithm),
        seed,
        first_step=first_step,
        position=position,
        progress=progress,
    )
