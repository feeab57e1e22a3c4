"""The shadow trainer repeats what no preset uses: other functions of each axis, KLs, controllers, adapters.

The policy moves visibly here, so that ratios leave 1 and the reference is left behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from covey.objective.algorithms import PRESETS
from covey.objective.axes import AXES
from covey.proof.check_run import check_run
from covey.runs.rollouts import read_rollouts
from covey.sampling.base import SampledCompletion
from covey.sampling.local import LocalSampler
from covey.system.console import RunConsole
from tests.proof.cases import PROCESS, TRAINABLE, Model, mixed, trained_and_repeated
from tests.training.runs import metrics_of, start

STEPS = 3
TRAIN = {"lr": 1e-3, "updates_per_batch": 2, "tokens_per_micro_batch": 20}
"""Several micro-batches an update, so that a mean over one of them is another number."""
ROLLOUT = {"prompts_per_step": 3, "group_size": 3, "max_tokens": 8}
BITES = {
    "pass_at_k": {"k": 2},
    "process_leave_one_out": {"gamma": 0.8},
    "masked": {"low": 0.7, "high": 1.5, "level": "token"},
    "truncated": {"cap": 1.2, "level": "sequence"},
    "geometric_mask": {"low": 0.9, "high": 1.1},
    "off_policy_mask": {"delta": 0.1},
    "divergence_mask_kl": {"threshold": 1e-6},
}
"""Bounds that these policies reach within a few steps."""


def proved_by_presets() -> set[Callable[..., Any]]:
    """Functions that some preset uses, and with it a case of test_shadow."""
    algorithms = [PRESETS[name] for name in TRAINABLE]
    used = {choice.function for a in algorithms for choice in a.functions}
    return used | {a.kl.estimator.function for a in algorithms if a.kl}


def left_over() -> Iterator[tuple[str, str]]:
    """(axis, function) of all others: a function that is added has to be known to the shadow.

    Filters act before what the shadow repeats.
    """
    proved = proved_by_presets()
    for axis, functions in AXES.items():
        for function in functions:
            if axis not in ("filter", "kl.estimator") and function not in proved:
                yield axis, function.__name__


def proof(output: Path, model: Model, algorithm: dict[str, Any], **settings: Any) -> None:
    """Train and repeat; all agree but the recorded log-probs, which some tests put off."""
    settings = {"rollout": ROLLOUT, "train": TRAIN, **settings}
    steps = trained_and_repeated(output, model, STEPS, algorithm=algorithm, **settings)
    assert len(steps) == STEPS
    for step in steps:
        assert step.advantages < 1e-5
        assert step.gradient < 1e-4
        assert step.kl_coef < 1e-5
    assert steps[-1].course is not None
    assert steps[-1].course < 1e-3
    assert all(m["optimizer/grad_norm"] > 0 for m in metrics_of(output))


def another_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the sampler record log-probs that are off by up to half a nat."""
    sample = LocalSampler.sample

    def off(self: LocalSampler, *arguments: Any) -> Iterator[SampledCompletion]:
        for sampled in sample(self, *arguments):
            completion = sampled.completion
            recorded = completion.logprobs + np.float32(0.5) * np.sin(completion.tokens).astype(np.float32)
            yield sampled._replace(completion=replace(completion, logprobs=recorded))

    monkeypatch.setattr(LocalSampler, "sample", off)
    monkeypatch.setattr(LocalSampler, "bit_exact", False)


def test_the_kl_coefficient_and_the_reference_are_steered_alike(tmp_path: Path, model: Model) -> None:
    kl: dict[str, Any] = {"coef": 0.5, "target": 0.05, "horizon": 20, "refresh_every": 4, "refresh_mix": 0.5}
    proof(tmp_path / "run", model, {"name": "grpo", "kl": kl})
    for one, after in pairwise(metrics_of(tmp_path / "run")):
        assert (after["kl/coef"] > one["kl/coef"]) == (one["kl/completion_k1"] > kl["target"])


def test_the_entropy_bonus_is_steered_alike(tmp_path: Path, model: Model) -> None:
    algorithm = {"name": "dapo", "filter": None, "entropy": {"coef": 0.05, "target": 3.0}}
    proof(tmp_path / "run", model, algorithm)
    coefficients = [m["entropy/coef"] for m in metrics_of(tmp_path / "run")]
    assert coefficients[0] != coefficients[-1]


def test_a_steered_coefficient_acts_on_rewards_too(tmp_path: Path, model: Model) -> None:
    kl = {
        "estimator": "k1",
        "coef": 2.0,
        "place": "reward",
        "level": "completion",
        "target": 1e-3,
        "horizon": 9,
    }
    proof(tmp_path / "run", model, {"name": "grpo", "kl": kl})


def test_every_inner_epoch_groups_anew(tmp_path: Path, model: Model) -> None:
    train = {**TRAIN, "inner_epochs": 2}
    proof(tmp_path / "run", model, {"name": "dapo", "filter": None}, train=train)


def test_the_ratio_to_another_engines_sampler_is_not_one_at_first(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    another_engine(monkeypatch)
    proof(tmp_path / "run", model, {"name": "dapo", "filter": None, "old": "sampler"})


@pytest.mark.parametrize("rollout", [{"top_p": 0.8, "temperature": 0.8}, {"mask_truncated": True}])
def test_the_shadow_leaves_out_undrawable_tokens_and_truncated_completions(
    tmp_path: Path, model: Model, rollout: dict[str, Any]
) -> None:
    """Tokens that could not be drawn, for policy and reference; truncated completions, in baselines too."""
    algorithm = {
        "name": "grpo",
        "kl": {"coef": 2.0},
        "reduce": "constant_length",
        "advantage": "length_weighted",
    }
    proof(tmp_path / "run", model, algorithm, rollout=rollout)


def test_a_refreshed_reference_is_the_policy_of_that_step(tmp_path: Path, model: Model) -> None:
    proof(tmp_path / "run", model, {"name": "grpo", "kl": {"coef": 2.0, "refresh_every": 3}})


def test_the_constant_length_is_that_of_the_config_not_of_the_longest(tmp_path: Path, model: Model) -> None:
    rollout = {**ROLLOUT, "max_tokens": 30, "stop": tuple("0123456789")}
    proof(tmp_path / "run", model, {"name": "dr_grpo"}, rollout=rollout)
    assert any(m["length/truncated"] == 0 for m in metrics_of(tmp_path / "run"))


def test_marks_drawn_by_chance_are_drawn_alike(tmp_path: Path, model: Model) -> None:
    mark = {"name": "random_covariant", "fraction": 0.3, "low": -99.0, "high": 99.0}
    proof(tmp_path / "run", model, {"name": "clip_cov", "filter": None, "select_tokens": mark})


@pytest.mark.parametrize("kl", [None, {"coef": 0.5}])
def test_adapters_are_trained_alike(tmp_path: Path, model: Model, kl: dict[str, Any] | None) -> None:
    run = tmp_path / "run"
    start(
        run,
        model=str(model.folder),
        algorithm={"name": "grpo", "kl": kl},
        rewards=(mixed,),
        rollout=ROLLOUT,
        train={**TRAIN, "steps": STEPS},
        lora={"rank": 2},
        eval={"problems": 2, "samples": 1},
    )
    found = check_run(run, STEPS, RunConsole(quiet=True))
    assert [f for f in found if not f.holds] == []
    assert len(found) == 5


@pytest.mark.parametrize(
    "algorithm",
    [
        {
            "correction": [
                {"name": "truncated", "cap": 1.2},
                {"name": "geometric_mask", "low": 0.9, "high": 1.1},
            ]
        },
        {"nll": 0.3, "reduce": {"name": "sequence_mean", "rows": "all", "eps": 1e-2}},
        {
            "advantage": {"name": "group_zscore", "single": "reward"},
            "reduce": {"name": "token_mean", "eps": 3.0},
        },
        {"name": "gpg", "whiten": {"of": "rewards"}},
        {"name": "reinforce_pp", "whiten": {"ddof": 0, "eps": 0.0, "floor": 2.0}, "kl": {"bound": 1e-3}},
        {"name": "grpo", "dialect": "nemo-rl-0.7"},
    ],
)
def test_every_setting_of_other_codes_is_known_to_the_shadow(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch, algorithm: dict[str, Any]
) -> None:
    if "correction" in algorithm:
        another_engine(monkeypatch)
    train = {**TRAIN, "updates_per_batch": 1 if algorithm.get("name") == "gpg" else 2}
    proof(tmp_path / "run", model, {"name": "dapo", "filter": None, **algorithm}, train=train)


@pytest.mark.parametrize("name", ["sequence_mean", "constant_length"])
def test_a_truncated_completion_is_a_row_where_the_config_says_so(
    tmp_path: Path, model: Model, name: str
) -> None:
    """As in TRL, whose mean over completions counts those that it masks."""
    algorithm = {"name": "dapo", "filter": None, "reduce": {"name": name, "rows": "all"}}
    proof(tmp_path / "run", model, algorithm, rollout={**ROLLOUT, "mask_truncated": True})
    ends = [row["finish"] for row in read_rollouts(tmp_path / "run", 1).rows]
    assert {"length", "stop"} <= set(ends)


@pytest.mark.parametrize(("axis", "name"), list(left_over()))
def test_every_function_is_known_to_the_shadow(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch, axis: str, name: str
) -> None:
    if axis == "correction":
        another_engine(monkeypatch)
    choice: Any = {"name": name, **BITES.get(name, {})}
    many = axis in ("token_weights", "correction")
    algorithm = {"name": "dapo", "filter": None, axis: [choice] if many else choice}
    rewards = PROCESS if name.startswith("process_") else (mixed,)
    proof(tmp_path / "run", model, algorithm, rewards=rewards)


@pytest.mark.parametrize("critic", [{"trunk": "own"}, {"trunk": "policy", "pull": 0.5}])
def test_a_critic_of_either_kind_is_trained_alike(
    tmp_path: Path, model: Model, critic: dict[str, Any]
) -> None:
    """It moves visibly, is clipped, discounts, and is paid by step and by token."""
    algorithm = {
        "name": "ppo",
        "advantage": {"gamma": 0.9, "lam": 0.7},
        "kl": {"coef": 0.5},
        "critic": {"lr": 3e-3, "lam": 0.5, "clip": 0.02, **critic},  # another rate than the policy's
    }
    proof(tmp_path / "run", model, algorithm, rewards=PROCESS)


def kls() -> Iterator[dict[str, Any]]:
    """Every estimator in every place, each gradient and each level.

    ``full`` is exact and by token; k1 by its formula is refused in the loss, where it teaches nothing.
    """
    estimators = [f.__name__ for f in AXES["kl.estimator"] if f.__name__ != "full"]
    yield {"estimator": "full"}
    for i, (estimator, gradient) in enumerate(
        product(estimators, ("formula", "straight_through", "ratio", "score"))
    ):
        if (estimator, gradient) != ("k1", "formula"):
            yield {"estimator": estimator, "gradient": gradient, "level": ("token", "completion")[i % 2]}
    for estimator, level in product(estimators, ("token", "completion")):
        yield {"estimator": estimator, "place": "reward", "level": level}
    yield {"estimator": "full", "bound": 1e-4}
    yield {"estimator": "k3", "gradient": "score", "bound": 1e-3}
    yield {"estimator": "k2", "gradient": "straight_through", "bound": 1e-4}


@pytest.mark.parametrize("kl", list(kls()), ids=lambda kl: "-".join(map(str, kl.values())))
def test_every_kl_is_known_to_the_shadow(tmp_path: Path, model: Model, kl: dict[str, Any]) -> None:
    proof(tmp_path / "run", model, {"name": "grpo", "kl": {"coef": 2.0, **kl}})
