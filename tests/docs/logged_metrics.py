"""Every metric that a step can log, for comparison with the pages."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from tests.fakes import component, group
from tests.objective.inputs import made_inputs, t

import covey
from covey.objective import corrections
from covey.objective.algorithms import PRESETS
from covey.objective.axis_function import bind
from covey.objective.diagnostics import (
    gradient_shares,
    group_metrics,
    step_spread,
    token_metrics,
    token_stats,
    value_metrics,
)
from covey.objective.loss import policy_loss
from covey.objective.signs import gradient_signs, group_signs
from covey.rollouts.metrics import tool_metrics
from covey.runs.estimates import Evaluation
from covey.tasks.difficulty import Difficulty
from covey_verify.types import StepRewards


def logged() -> set[str]:
    """Every metric that a step can log: what the functions return, and what the report adds."""
    everything = replace(
        PRESETS["grpo"],
        correction=(bind(corrections.decoupled),),
        entropy=None,
        surrogate=PRESETS["dapo"].surrogate,
    )
    inputs = made_inputs(
        sampler_logprobs=t([-1, -2], [-3, 0]), ref_logprobs=t([-1, -2], [-3, 0]), entropy=torch.ones(2, 2)
    )
    seen = token_metrics([token_stats(everything, inputs, policy_loss(everything, inputs))], everything)
    (one,) = groups = [group([1, 0])]
    groups = [replace(one, components={**one.components, "other_answer": component(one.rewards)})]
    verdicts = {"reward/NAME/STATUS", "reward/NAME/PART", "user/NAME"}  # tests/rewards/test_canaries.py
    names = {*seen, *verdicts, *group_metrics(groups), *gradient_shares(groups, torch.ones(2).numpy())}
    steps = (StepRewards([1.0], [0]), StepRewards([0.0], [0]))
    judged = replace(one, components={"j": component(one.rewards, steps=steps)})
    names |= set(Difficulty(3).metrics()) | signs() | set(step_spread([judged]))
    names |= set(tool_metrics(groups))
    names |= set(value_metrics(t([1, 2], [3, 4]), t([1, 0], [0, 1]), torch.ones(2, 2).bool()))
    right = np.ones(2, bool)
    evaluation = Evaluation(right, right.astype(int), right, right.astype(float), samples=2)
    names |= {re.sub(r"@\d+", "@K", name) for name in evaluation.summary()}
    names |= {"elapsed", "seconds/PHASE", "tokens_per_second/PHASE", "memory/PART_mib"}  # Clock.lap
    counting = ["training/metrics.py", "rollouts/loop.py", "rollouts/metrics.py"]
    for file in (*counting, "training/preference.py", "training/reward_model.py"):
        text = (Path(covey.__file__).parent / file).read_text(encoding="utf-8")
        families = "rollout|staleness|optimizer|kl|entropy|update|value|preference|reward_model"
        names |= set(re.findall(rf'"((?:{families})/\w+)"', text))
    names = {re.sub(r"\d\.\d\d_\d\.\d\d", "A_B", name) for name in names}
    names = {re.sub(r"quarter_\d", "quarter_N", name) for name in names}
    return {re.sub("(other_)?answer", "NAME", name) for name in names}


def signs() -> set[str]:
    """What is counted for the findings."""
    steps = (StepRewards([1.0], [0]), StepRewards([0.0], [0]))
    groups = [replace(group([1, 0]), components={"judge": component([1, 0], steps=steps)})]
    advantages = [np.ones(2), -np.ones(2)]
    return {*group_signs(groups), *gradient_signs(groups, advantages), "kl/start", "reward/paid_elsewhere",
            "text/reference", "text/reference_elsewhere", "text/reference_number"}  # fmt: skip
