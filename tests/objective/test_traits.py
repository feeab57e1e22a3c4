"""The traits that functions of the objective declare, each derived from the values that they compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from covey.objective import ratios
from covey.objective.algorithms import PRESETS
from covey.objective.axes import AXES
from covey.objective.axis_function import bind, data_names, has_trait
from covey.objective.data import GroupData
from covey_verify.types import StepRewards
from tests.objective.table import inputs_of, leaves, made_batch, made_groups

TOKENS = 3


def scored(*rewards: float) -> GroupData:
    """A group with every kind of data; each completion has two steps and a continued segment."""
    values = torch.tensor(rewards, dtype=torch.float64)
    shape = (len(rewards), TOKENS)
    at_the_end = torch.zeros(shape, dtype=torch.float64)
    at_the_end[:, -1] = values
    steps = tuple(StepRewards((0.25 * reward, reward), (1, TOKENS - 1)) for reward in rewards)
    return GroupData(
        rewards=values,
        components=values[None],
        weights=torch.ones(1, dtype=torch.float64),
        mask=torch.ones(shape, dtype=torch.bool),
        tokens=torch.arange(len(rewards) * TOKENS).view(shape),
        token_rewards=at_the_end,
        steps=(steps,),
        greedy_reward=0.3,
        old_logprobs=torch.full(shape, -1.0),
        old_collision=torch.full(shape, 0.5),
        values=torch.full(shape, 0.2, dtype=torch.float64),
        running_mean=torch.full((len(rewards),), 0.25, dtype=torch.float64),
        segments=tuple(StepRewards((0.1,), (1,)) for _ in rewards),
    )


@pytest.mark.parametrize("advantage", AXES["advantage"], ids=lambda f: f.__name__)
def test_an_advantage_that_compares_siblings_is_0_for_one_completion(advantage: Callable[..., Any]) -> None:
    alone = [bind(advantage)(scored(reward)) for reward in (0.5, 1.0, 5.0)]

    assert has_trait(advantage, "compares_siblings") == all(not value.any() for value in alone)


@pytest.mark.parametrize("advantage", AXES["advantage"], ids=lambda f: f.__name__)
def test_an_advantage_that_divides_by_a_std_does_not_know_the_rewards_unit(
    advantage: Callable[..., Any],
) -> None:
    rewards = (1.0, 0.0, 0.5, 0.25)
    in_another_unit = bind(advantage)(scored(*(2 * reward for reward in rewards)))
    is_the_same = torch.allclose(in_another_unit, bind(advantage)(scored(*rewards)), atol=1e-3)

    # `mean_normalized` divides by the mean, so it does not know the unit either.
    assert is_the_same == (has_trait(advantage, "divides_by_std") or advantage.__name__ == "mean_normalized")


def gradients(surrogate: Callable[..., Any], log_ratio: float) -> tuple[Tensor, Tensor]:
    """Gradients by the log-probs of the losses of completions with the advantage 1, and of those with 0."""
    batch = made_batch(PRESETS["kl_cov"], made_groups())
    inputs = inputs_of(batch, leaves())
    logprobs = (inputs.old_logprobs + log_ratio).requires_grad_()
    alternate = torch.zeros_like(inputs.advantages)
    alternate[::2] = 1.0
    inputs = replace(
        inputs,
        logprobs=logprobs,
        ratio=ratios.token(logprobs - inputs.old_logprobs),
        advantages=alternate,
        selected=inputs.mask,
    )
    losses = bind(surrogate)(inputs) * inputs.mask
    by_rows = [
        torch.autograd.grad(losses[first::2].sum(), logprobs, retain_graph=True)[0] for first in (0, 1)
    ]
    return by_rows[0], by_rows[1]


@pytest.mark.parametrize("surrogate", AXES["surrogate"], ids=lambda f: f.__name__)
def test_a_proportional_surrogate_has_no_gradient_without_an_advantage(
    surrogate: Callable[..., Any],
) -> None:
    _, without_advantage = gradients(surrogate, log_ratio=0.5)

    assert has_trait(surrogate, "proportional") == (not without_advantage.any())


@pytest.mark.parametrize(
    "surrogate", [f for f in AXES["surrogate"] if "ratio" in data_names(f)], ids=lambda f: f.__name__
)
def test_a_surrogate_that_bounds_the_ratio_gives_a_ratio_of_400_no_weight_of_400(
    surrogate: Callable[..., Any],
) -> None:
    with_advantage, _ = gradients(surrogate, log_ratio=6.0)

    assert has_trait(surrogate, "bounds_ratio") == bool(with_advantage.abs().max() < 100)
