"""Held-out accuracy and reward, measured: each problem greedily and by samples."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np

from covey.estimates import Basis, Evaluation
from covey.learned import identity_of, is_learned
from covey.prompts import Prompted
from covey.rewards.base import Reward, Rewards
from covey.rewards.extract import Rule, extract
from covey.rewards.scorer import Scorer
from covey.rng import key
from covey.rollouts.groups import Progress, score_all
from covey.runs.inventory import code_of
from covey.sampling.base import Sampler, SamplingParams
from covey.types import Group


def evaluate(
    problems: Sequence[Prompted],
    sampler: Sampler,
    rewards: Rewards,
    params: SamplingParams,
    samples: int,
    seed: int,
    progress: Progress,
) -> Evaluation:
    """Sample each problem greedily and ``samples`` times. The verdict above 1/2 means correct.

    The draws are keyed by seed and problem alone, so two policies get the same random numbers.
    """
    verdict = rewards.verdict
    requests = [p.request([key(seed, "eval", p.problem.id, s) for s in range(samples)]) for p in problems]
    likeliest = [replace(r, streams=r.streams[:1], greedy=True) for r in requests]
    asked = [*requests, *likeliest]
    groups = score_all([*problems, *problems], asked, sampler, params, Scorer(rewards), progress)
    drawn, greedy = groups[: len(problems)], groups[len(problems) :]
    return Evaluation(
        greedy=np.array([bool(g.correct[0]) for g in greedy]),
        correct=np.array([int(g.correct.sum()) for g in drawn]),
        majority=np.array([_majority(g, verdict) for g in drawn]),
        reward=np.array([g.rewards[g.scorable].mean() if g.scorable.any() else np.nan for g in drawn]),
        samples=samples,
        verdict=verdict.name,
        basis=basis_of(problems, rewards),
    )


def basis_of(problems: Sequence[Prompted], rewards: Rewards) -> Basis:
    """What tells whether two evaluations measure the same."""
    weighed = sorted((_identity(r), r.weight, r.gated_by or "") for r in rewards)
    asked = [[p.problem.prompt, {k: str(v) for k, v in p.problem.columns.items()}] for p in problems]
    return Basis(_identity(rewards.verdict), _hash(weighed), tuple(_hash(one)[:8] for one in asked))


def _identity(reward: Reward) -> str:
    """Of what a reward does: its name, its settings, the sources of a user's function, a model's weights."""
    settings = {k: v for k, v in reward.plain_settings.items() if k != "config_folder"}
    if is_learned(reward):
        settings["model"] = identity_of(reward)
    folder = Path(reward.home[1]) if reward.home else Path()
    return _hash([reward.name, settings, code_of(reward.function, folder)])


def _hash(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=lambda other: type(other).__name__)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _majority(group: Group, reward: Reward) -> bool:
    parameter = reward.parameters.get("rule")
    rule = reward.settings.get("rule", parameter.default if parameter else None)
    texts = [extract(c.text, rule) if rule in get_args(Rule) else c.text for c in group.completions]
    votes = Counter(t for t in texts if t is not None)
    if not votes:
        return False
    winner = votes.most_common(1)[0][0]
    return bool(group.correct[texts.index(winner)])
