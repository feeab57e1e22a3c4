"""Which rules cannot act with one update per batch: declared by what a function reads, here evaluated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.objective.table import inputs_of, leaves, made_batch, made_groups
from torch import Tensor

from covey.config.contradictions import contradictions, notes_on, rules_of_ratio
from covey.objective import ratios, surrogates, token_weights
from covey.objective.algorithms import PRESETS
from covey.objective.axes import AXES
from covey.objective.axis_function import bind, data_names, has_trait, setting_defaults

OTHER: dict[str, Any] = {
    "clip_low": 0.01,
    "clip_high": 0.01,
    "beta": 3.0,
    "dual_clip": 1.05,
    "cap": 1.02,
    "floor": 0.98,
    "tau_up": 3.0,
    "tau_down": 3.0,
    "k_up": 0.5,
    "lam_up": 0.5,
    "k_down": 0.5,
    "lam_down": 0.5,
    "threshold": 0.01,
    "coef": 3.0,
    "clip_log": 0.01,
    "half_life": 1.0,
    "low": 0.5,
    "high": 3.0,
    "outlier": 1.1,
    "safety": 0.5,
}
"""Another value of each setting, far enough to be seen off the ratio 1."""
READS = [f for f in AXES["token_weights"] if "log_ratio" in data_names(f)]
CASES = [
    (axis, function, setting)
    for axis, functions in {**AXES, "token_weights": READS}.items()
    if axis in ("ratio", "surrogate", "token_weights")
    for function in functions
    if not has_trait(function, "acts_at_ratio_one")
    for setting in setting_defaults(function)
]


def moved(by: float, axis: str, function: Any, **settings: Any) -> tuple[Tensor, Tensor]:
    """The loss and its gradient with a policy whose log-probs are ``by`` times a draw from the old ones'."""
    algorithm = PRESETS["kl_cov"]
    batch = made_batch(algorithm, made_groups())
    policy = leaves()
    shift = torch.linspace(-1, 1, policy.logprobs.numel()).view_as(policy.logprobs)
    inputs = inputs_of(batch, policy)
    logprobs = (inputs.old_logprobs + by * shift[: len(batch), : batch.mask.shape[1]]).requires_grad_()
    inputs = inputs_of(batch, policy, logprobs=logprobs, ratio=ratios.token(logprobs - inputs.old_logprobs))
    values = bind(function, **settings)(inputs)
    if axis == "ratio":
        values = values * inputs.advantages
    elif axis == "token_weights":
        values = values.detach() * logprobs
    total = (values * inputs.mask).sum()
    return total.detach(), torch.autograd.grad(total, logprobs)[0]


@pytest.mark.parametrize(("axis", "function", "setting"), CASES, ids=lambda x: getattr(x, "__name__", x))
def test_settings_that_are_said_not_to_act_do_not_and_do_off_policy(
    axis: str, function: Any, setting: str
) -> None:
    plain = {"dual_clip": 1.3} if setting == "dual_clip" else {}
    other = {setting: OTHER[setting]}
    differences = [
        (moved(by, axis, function, **plain)[1] - moved(by, axis, function, **other)[1]).abs().max()
        for by in (0.0, 0.3, 3.0)
    ]
    assert differences[0] < 1e-12
    assert max(differences[1:]) > 1e-6


def test_what_acts_at_a_ratio_of_one_is_not_said_to_be_idle() -> None:
    one, other = (moved(0.0, "surrogate", surrogates.group_classification, tau=t)[1] for t in (0.5, 1.0))
    assert not torch.allclose(one, other)
    assert notes_on(PRESETS["real"], updates=1) == []


def test_what_is_refused_changes_nothing_at_all() -> None:
    _, penalised = moved(0.0, "surrogate", surrogates.kl_on_selected)
    _, plain = moved(0.0, "surrogate", surrogates.unclipped)
    assert torch.equal(penalised, plain)
    _, weighted = moved(0.0, "token_weights", token_weights.future_influence)
    assert weighted.unique().tolist() in ([1.0], [0.0, 1.0])


def test_rules_that_cannot_act_are_named_with_their_settings() -> None:
    (note,) = notes_on(PRESETS["dapo"], updates=1)
    assert "every ratio is 1, so clip (clip_low 0.2, clip_high 0.28) cannot act" in note
    assert notes_on(PRESETS["dapo"], updates=2) == []
    assert notes_on(PRESETS["reinforce"], updates=1) == []
    (note,) = notes_on(PRESETS["dppo"], updates=1)
    assert "only where sampler and trainer disagree" in note
    assert [r.partition(" ")[0] for r in rules_of_ratio(PRESETS["fipo"])] == ["clip", "future_influence"]


def test_a_users_own_rule_is_not_judged() -> None:
    def mine(log_ratio: Tensor, *, power: float = 2.0) -> Tensor:
        return 1 + log_ratio**power

    algorithm = PRESETS["grpo"].variant("mine", token_weights=(bind(mine),))
    assert all("mine" not in rule for rule in rules_of_ratio(algorithm))
    assert contradictions(algorithm, 8, 1) == []


def test_only_an_advantage_that_compares_siblings_is_refused_for_a_group_of_one() -> None:
    refused = {
        name for name, preset in PRESETS.items() if "siblings" in " ".join(contradictions(preset, 1, 1))
    }

    # Their values come from the prompt's past, a critic, or continuations of the completion itself.
    assert not refused & {"reinforce", "remax", "rae", "ppo", "vine_ppo"}
    assert {"grpo", "rloo", "dr_grpo", "grpo_prefix_tree"} <= refused
