"""Every algorithm of the table through every property."""

from __future__ import annotations

import inspect
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from covey.learner.batching import Batch
from covey.objective.axes import AXES
from covey.objective.loss import policy_loss
from covey.types import Group
from tests.fakes import component
from tests.objective.table import (
    ALGORITHMS,
    CRITIC_FREE,
    NAMES,
    REWARDS,
    Leaves,
    evaluated,
    gradient,
    identities,
    inputs_of,
    leaves,
    made_batch,
    made_groups,
    per_token,
)

every_algorithm = pytest.mark.parametrize("name", NAMES)
every_critic_free = pytest.mark.parametrize("name", CRITIC_FREE)

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


def close(a: Tensor, b: Tensor) -> None:
    """Equal up to rounding, relative to the largest entry."""
    scale = float(b.abs().max()) or 1.0
    assert float((a - b).abs().max()) <= TOLERANCE[b.dtype] * scale


def same_step(a: tuple[Tensor, Leaves], b: tuple[Tensor, Leaves]) -> None:
    """The same loss and gradient. The loss is a sum that may cancel: its scale is the gradient's mass."""
    (loss, slope), (expected, expected_slope) = a, b
    for x, y in zip(slope, expected_slope, strict=True):
        close(x, y)
    mass = sum(float(s.abs().sum()) for s in expected_slope)
    assert abs(float(loss - expected)) <= TOLERANCE[expected.dtype] * max(mass, abs(float(expected)))


def test_the_table_holds_every_function_of_every_axis() -> None:
    used = {choice.function for a in ALGORITHMS.values() for choice in a.functions}
    used |= {a.kl.estimator.function for a in ALGORITHMS.values() if a.kl}
    offered = {function for axis, functions in AXES.items() if axis != "filter" for function in functions}
    assert offered - used == set()


def test_the_functions_of_an_axis_are_all_there() -> None:
    # A public function of an axis's module is on the axis, or is one of its helpers.
    helpers = {"centered", "standard_deviation", "divided", "per_completion", "clamp_log_ratio", "at_level"}
    helpers |= {"with_gradient", "covariance", "discounted_sum", "running_means", "bounded_value"}
    for axis in (
        "whiten",
        "ratio",
        "surrogate",
        "kl.estimator",
        "reduce",
        "correction",
        "token_weights",
        "filter",
    ):
        module = inspect.getmodule(AXES[axis][0])
        assert module is not None
        own = {
            n for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__
        }
        listed = {f.__name__ for functions in AXES.values() for f in functions}
        assert {n for n in own if not n.startswith("_")} - helpers <= listed, axis


# --- cutting, packing, permuting, padding ---------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every_algorithm
def test_micro_batches_add_up_to_the_step(name: str, dtype: torch.dtype) -> None:
    algorithm = ALGORITHMS[name]
    batch = made_batch(algorithm, made_groups(), dtype)
    whole = evaluated(algorithm, batch)
    for budget in (1, 12, 30):
        same_step(evaluated(algorithm, batch, budget), whole)


@every_algorithm
def test_skipping_idle_completions_changes_nothing(name: str) -> None:
    algorithm = ALGORITHMS[name]
    batch = made_batch(algorithm, made_groups())
    same_step(evaluated(algorithm, batch, skip_idle=algorithm.skips_idle), evaluated(algorithm, batch))


@every_algorithm
def test_order_of_completions_and_groups_does_not_matter(name: str) -> None:
    algorithm = ALGORITHMS[name]
    groups = made_groups()
    rng = np.random.default_rng(3)
    shuffled = [permuted(groups[g], rng.permutation(len(groups[g].completions))) for g in (2, 0, 3, 1)]
    expected = evaluated(algorithm, made_batch(algorithm, groups))
    same_step(evaluated(algorithm, made_batch(algorithm, shuffled)), expected)


@every_algorithm
def test_rows_of_a_batch_may_stand_anywhere(name: str) -> None:
    algorithm = ALGORITHMS[name]
    batch = made_batch(algorithm, made_groups())
    scattered = batch.select(np.random.default_rng(4).permutation(len(batch)).tolist())
    for budget in (10**9, 9):
        same_step(evaluated(algorithm, scattered, budget), evaluated(algorithm, batch))


def permuted(group: Group, order: np.ndarray) -> Group:
    known = group.baselines
    return replace(
        group,
        completions=tuple(group.completions[i] for i in order),
        rewards=group.rewards[order],
        components={
            name: component(c.values[order], c.weight, tuple(c.steps[i] for i in order if c.steps), c.verdict)
            for name, c in group.components.items()
        },
        baselines=replace(
            known,
            running_mean=None if known.running_mean is None else known.running_mean[order],
            segments=tuple(known.segments[i] for i in order),
        ),
    )


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf")])
@every_algorithm
def test_padding_may_hold_anything(name: str, garbage: float) -> None:
    algorithm = ALGORITHMS[name]
    batch = made_batch(algorithm, made_groups())
    policy = leaves()
    clean = policy_loss(algorithm, inputs_of(batch, policy))
    clean.total.backward()
    expected = gradient(policy)

    policy = leaves()
    names = (
        "logprobs",
        "entropy",
        "full_kl",
        "advantages",
        "old_logprobs",
        "sampler_logprobs",
        "ref_logprobs",
    )
    inputs = inputs_of(batch, policy)
    soiled = {n: soil(getattr(inputs, n), batch.mask, garbage) for n in names}
    pad = torch.nn.functional.pad
    mask = pad(batch.mask, (0, 3, 0, 1))
    selected = pad(batch.selected, (0, 3, 0, 1), value=True) if batch.selected is not None else None
    counts = pad(batch.group_tokens, (0, 1))
    correct = pad(batch.correct, (0, 1), value=True)
    of_rows = {"correct": correct, "group": pad(batch.group, (0, 1))}
    padded = replace(inputs, **soiled, **of_rows, mask=mask, selected=selected, group_tokens=counts)
    loss = policy_loss(algorithm, padded)
    loss.total.backward()
    same_step((loss.total.detach(), gradient(policy)), (clean.total.detach(), expected))
    rows = torch.tensor(identities(batch))
    trained = torch.zeros_like(policy.logprobs, dtype=torch.bool)
    trained[rows, : batch.mask.shape[1]] = batch.mask
    assert all(not slope[~trained].any() for slope in gradient(policy))


def soil(values: Tensor, mask: Tensor, garbage: float) -> Tensor:
    """(N, T) -> (N + 1, T + 3) with garbage wherever nothing is trained."""
    return torch.nn.functional.pad(values.where(mask, garbage), (0, 3, 0, 1), value=garbage)


# --- rewards --------------------------------------------------------------------------------------

KEEPS_THE_SHIFT = {
    "reinforce": "no baseline",
    "discounted": "no baseline",
    "max_rl": "divides by the mean reward",
    "short": "penalises by it",
    "gpg_rewards": "counts rewards other than 0",
}
SPEAKS_OF_TIES = {"discounted", "short", "singles_kept"}
"""No baseline, lengths count, or a lone completion keeps its reward."""
every_other = pytest.mark.parametrize("name", [n for n in CRITIC_FREE if n not in SPEAKS_OF_TIES])


@every_critic_free
def test_a_constant_added_to_all_rewards_changes_nothing(name: str) -> None:
    algorithm = ALGORITHMS[name]
    plain = made_batch(algorithm, made_groups()).advantages
    shifted = made_batch(algorithm, made_groups(shift=4.0)).advantages
    # Advantages are stored in float32; 4 + r costs some of the 53 bits of r before that.
    same = torch.allclose(plain, shifted, rtol=1e-6, atol=1e-12)
    assert same == (name not in KEEPS_THE_SHIFT)


ACROSS_GROUPS = {"reinforce", "reinforce_pp", "batch_baseline", "rpp_floor"}
"""Their baseline is none, or that of the batch: groups that tie at different rewards are not idle."""


@settings(deadline=None, max_examples=15)
@given(
    values=st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=3, unique=True),
    size=st.integers(1, 5),
)
@every_other
def test_equal_rewards_give_exactly_zero(name: str, values: list[float], size: int) -> None:
    algorithm = replace(ALGORITHMS[name], kl=None, select_tokens=None, token_weights=())
    across = [values[0]] * len(values) if name in ACROSS_GROUPS else values
    batch = made_batch(algorithm, made_groups([[value] * size for value in across]))
    expected = values[0] if name == "reinforce" else 0.0
    assert (batch.advantages[batch.mask] == expected).all()


@pytest.mark.parametrize("eps", [0.0, 1e-12])
@pytest.mark.parametrize("value", [0.7, 0.1, 1 / 3, 1e-8])
@every_other
def test_no_eps_is_small_enough_to_make_noise_of_equal_rewards(name: str, value: float, eps: float) -> None:
    algorithm = replace(ALGORITHMS[name], kl=None, select_tokens=None, token_weights=())
    for axis in ("advantage", "whiten"):
        choice = getattr(algorithm, axis)
        if choice is not None and "eps" in choice.all_settings:
            algorithm = replace(
                algorithm, **{axis: replace(choice, settings={**choice.settings, "eps": eps})}
            )
    batch = made_batch(algorithm, made_groups([[value] * 3, [value] * 4]))
    expected = torch.tensor(value).double() if name == "reinforce" else 0.0
    assert (batch.advantages[batch.mask] == expected).all()


@every_critic_free
def test_groups_do_not_see_each_other(name: str) -> None:
    algorithm = ALGORITHMS[name]
    changed = [(5.0, -2.0, 1.0, 9.0), *REWARDS[1:]]
    before = made_batch(algorithm, made_groups())
    after = made_batch(algorithm, made_groups(changed))
    others = before.group != 0
    same = torch.equal(before.advantages[others], after.advantages[others])
    assert same == (algorithm.whiten is None)
    assert not torch.equal(before.advantages[~others], after.advantages[~others])
    if algorithm.whiten is None and algorithm.select_tokens is None and not algorithm.nll:
        # The first group's NaN became a number, so counts differ; hold the mask and compare gradients.
        held = replace(after, mask=before.mask, advantages=after.advantages * before.mask)
        rows = [i for i, other in zip(identities(before), others.tolist(), strict=True) if other]
        (_, a), (_, b) = evaluated(algorithm, before), evaluated(algorithm, held)
        assert torch.equal(a.logprobs[rows], b.logprobs[rows])


# --- the gradient ---------------------------------------------------------------------------------


def on_policy(batch: Batch) -> tuple[Batch, Leaves]:
    """The batch as if the policy being trained had just sampled it."""
    now = per_token("logprobs")[identities(batch), : batch.mask.shape[1]].to(batch.advantages.dtype)
    return replace(batch, old_logprobs=now, sampler_logprobs=now, ref_logprobs=now), leaves()


@pytest.mark.parametrize("name", [n for n in NAMES if not ALGORITHMS[n].whole_groups])
def test_on_policy_the_gradient_is_that_of_reinforce(name: str) -> None:
    """-w_i A_it, times the masks that an algorithm lays over tokens and no more."""
    algorithm = replace(ALGORITHMS[name], kl=None, entropy=None, nll=0.0)
    batch, policy = on_policy(made_batch(ALGORITHMS[name], made_groups()))
    inputs = inputs_of(batch, policy)
    policy_loss(algorithm, inputs).total.backward()
    expected = -(algorithm.reduce(inputs)[:, None] * inputs.advantages * batch.mask)
    for factor in algorithm.token_weights:
        expected = expected * factor(inputs)
    if algorithm.ratio.name == "completion":  # the product's gradient is the whole return on every token
        expected = expected * batch.mask.sum(-1, keepdim=True)
        if algorithm.surrogate.name == "vespo":  # ... but here it is a detached weight on log pi
            expected = expected / batch.mask.sum(-1, keepdim=True).clamp(min=1)
    if algorithm.ratio.name in ("sequence", "geometric_clipped"):  # each token moves the mean of all
        mean = expected.sum(-1, keepdim=True) / batch.mask.sum(-1, keepdim=True).clamp(min=1)
        expected = mean * batch.mask
    got = gradient(policy).logprobs[identities(batch), : batch.mask.shape[1]]
    close(got, expected)


@pytest.mark.parametrize("far", [100.0, -100.0])
@every_algorithm
def test_far_log_ratios_give_finite_loss_and_gradient(name: str, far: float) -> None:
    algorithm = ALGORITHMS[name]
    batch = made_batch(algorithm, made_groups(), torch.float32)
    others = ("old_logprobs", "ref_logprobs", "sampler_logprobs")
    for moved in others if far > 0 else ("logprobs",):
        for sign in (1.0, -1.0):
            policy = leaves(torch.float32)
            if moved == "logprobs":
                policy.logprobs.data += far
            change = {n: getattr(batch, n) - far for n in others if n == moved}
            flipped = replace(batch, advantages=sign * batch.advantages, **change)
            loss = policy_loss(algorithm, inputs_of(flipped, policy)).total
            loss.backward()
            assert loss.isfinite()
            assert all(g.isfinite().all() for g in gradient(policy))


@every_algorithm
def test_gradient_flows_only_through_the_policy_being_trained(name: str) -> None:
    algorithm = ALGORITHMS[name]
    batch, policy = made_batch(algorithm, made_groups()), leaves()
    data = {
        n: getattr(batch, n).clone().requires_grad_()
        for n in ("advantages", "old_logprobs", "ref_logprobs", "sampler_logprobs")
    }
    loss = policy_loss(algorithm, inputs_of(batch, policy, **data))
    loss.total.backward()
    assert all(values.grad is None for values in data.values())
    slope = gradient(policy)
    assert slope.logprobs.any()
    assert slope.entropy.any() == (algorithm.entropy is not None)
    assert slope.full_kl.any() == ("full_kl" in algorithm.needs)


def derivable(name: str) -> bool:
    """Whether the gradient is that of the loss's value: nothing in it is detached."""
    algorithm = ALGORITHMS[name]
    detached = {"cispo", "vespo", "divergence_mask_tv", "divergence_mask_kl"}
    detached |= {"future_influence", "off_policy_mask", "on_policy", "sequence_token"}
    straight = algorithm.kl is not None and algorithm.kl.gradient in ("straight_through", "score")
    return not straight and not detached & {c.name for c in algorithm.functions}


@pytest.mark.parametrize("name", [n for n in NAMES if derivable(n)])
def test_finite_differences_agree(name: str) -> None:
    algorithm = ALGORITHMS[name]
    batch, policy = made_batch(algorithm, made_groups()), leaves()
    policy_loss(algorithm, inputs_of(batch, policy)).total.backward()
    direction = torch.from_numpy(np.random.default_rng(5).normal(size=policy.logprobs.shape))
    slope = sum(float((g * direction).sum()) for g in gradient(policy))

    def along(step: float) -> float:
        moved = Leaves(*(p.detach() + step * direction for p in policy))
        return float(policy_loss(algorithm, inputs_of(batch, moved)).total)

    step = 1e-6
    assert (along(step) - along(-step)) / (2 * step) == pytest.approx(slope, rel=1e-6, abs=1e-9)
