"""What the explainers claim of the method, seen on a step or on runs of seconds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from covey.learner.advantage import with_advantages
from covey.learner.batching import collate
from covey.objective.algorithms import PRESETS
from covey.objective.loss import policy_loss
from tests.fakes import component, group
from tests.objective.inputs import made_inputs
from tests.training.runs import start, varied


def v(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float64)


def steps_of(output: Path, **settings: Any) -> list[dict[str, float]]:
    start(output, **{"rewards": (varied,), "eval": {"problems": 2, "samples": 1}, **settings})
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", ["reinforce", "grpo", "dr_grpo", "gspo", "cispo"])
def test_a_step_raises_what_was_good_and_lowers_what_was_bad(name: str) -> None:
    logits = torch.zeros(2, 2, 3, dtype=torch.float64, requires_grad=True)
    before = logits.log_softmax(-1)[..., 0]
    inputs = made_inputs(logprobs=before, old_logprobs=before.detach(), ref_logprobs=before.detach())
    policy_loss(PRESETS[name], inputs).total.backward()
    after = (logits - 0.1 * logits.grad).log_softmax(-1)[..., 0]
    change = torch.where(inputs.mask, (after - before).detach(), 0.0)
    assert change.sign().tolist() == inputs.advantages.sign().tolist()


def test_rewards_in_other_units_give_the_same_run(tmp_path: Path) -> None:
    algorithm = {"name": "grpo", "kl": None, "advantage": {"eps": 0.0}}
    plain, scaled = (
        steps_of(tmp_path / str(weight), algorithm=algorithm, rewards=({varied: weight},), train={"steps": 3})
        for weight in (1.0, 10.0)
    )
    for one, ten in zip(plain, scaled, strict=True):
        assert ten["reward/mean"] == pytest.approx(10 * one["reward/mean"])
        assert ten["optimizer/grad_norm"] == pytest.approx(one["optimizer/grad_norm"], rel=1e-3)
        assert ten["entropy"] == pytest.approx(one["entropy"], rel=1e-3)


def test_a_sum_loses_what_normalising_each_reward_keeps() -> None:
    # Beside a failure, one success of two and two of two are the same to the z-score of the sum.
    right = component(v(0, 1), verdict=True)
    half, both = (
        replace(group([0, total]), components={"right": right, "neat": component(v(0, neat))})
        for total, neat in ((1, 0), (2, 1))
    )
    apart = {
        name: with_advantages(
            collate([half, both]), [half, both], replace(PRESETS[name], kl=None)
        ).advantages[:, 0]
        for name in ("grpo", "gdpo")
    }
    assert apart["grpo"][3] == pytest.approx(float(apart["grpo"][1]), rel=1e-3)
    assert apart["gdpo"][3] == pytest.approx(2 * float(apart["gdpo"][1]), rel=1e-3)


def test_the_clip_binds_once_a_batch_is_used_again(tmp_path: Path) -> None:
    several = {"steps": 1, "inner_epochs": 4, "updates_per_batch": 2, "lr": 3e-3}
    unclipped = {"name": "grpo", "kl": None, "surrogate": {"clip_low": 0.999, "clip_high": 1e6}}
    (once,) = steps_of(
        tmp_path / "once", algorithm="grpo", train={**several, "inner_epochs": 1, "updates_per_batch": 1}
    )
    (often,) = steps_of(tmp_path / "often", algorithm={"name": "grpo", "kl": None}, train=several)
    (free,) = steps_of(tmp_path / "free", algorithm=unclipped, train=several)
    assert (once["clip/low"], once["clip/high"], once["optimizer/updates"]) == (0, 0, 1)
    assert often["optimizer/updates"] == free["optimizer/updates"] == 8
    assert often["clip/low"] + often["clip/high"] > 0.01
    # The ratio is against the policy that sampled, through all epochs: it spreads, and more without a clip.
    assert once["ratio/q99"] - once["ratio/q01"] < 1e-3
    assert 0.1 < often["ratio/q99"] - often["ratio/q01"] < free["ratio/q99"] - free["ratio/q01"]
