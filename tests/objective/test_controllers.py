"""Controllers and group filters by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from covey.objective.algorithms import PRESETS
from covey.objective.controllers import (
    Coefficients,
    adaptive_entropy,
    adaptive_kl,
    first_coefficients,
    next_coefficients,
    resumed_coefficients,
)
from covey.objective.filters import informative, pass_rate_band
from covey.objective.penalties import KL, Entropy
from tests.fakes import group


@pytest.mark.parametrize(
    ("kl", "completions", "expected"),
    [
        (6.0, 1000, 0.1),  # on target
        (6.6, 1000, 0.1 * (1 + 0.1 * 0.1)),  # 10 % above, a tenth of the horizon
        (60.0, 1000, 0.1 * (1 + 0.2 * 0.1)),  # the error is clipped at 20 %
        (0.0, 1000, 0.1 * (1 - 0.2 * 0.1)),
        (0.0, 10**6, 0.1 * 0.8),  # never by more than 20 %, however many completions
        (-3.0, 1000, 0.1 * (1 - 0.2 * 0.1)),  # k1 can be negative
    ],
)
def test_adaptive_kl(kl: float, completions: int, expected: float) -> None:
    assert adaptive_kl(0.1, kl, 6.0, completions, 10_000) == pytest.approx(expected)


def test_adaptive_entropy_steps_towards_the_target_within_its_range() -> None:
    assert adaptive_entropy(0.01, 0.1, 0.2) == pytest.approx(0.015)
    assert adaptive_entropy(0.01, 0.3, 0.2) == pytest.approx(0.005)
    assert adaptive_entropy(0.0, 0.3, 0.2) == 0.0
    assert adaptive_entropy(0.1, 0.1, 0.2) == 0.1
    assert adaptive_entropy(0.01, 0.1, 0.2, step=0.5, highest=0.3) == 0.3


def test_coefficients_follow_the_kl_of_a_completion_and_the_entropy_of_a_token() -> None:
    kl = KL(coef=0.1, target=6.0, horizon=10_000)
    algorithm = replace(PRESETS["grpo"], kl=kl, entropy=Entropy(coef=0.01, target=0.2))
    now = first_coefficients(algorithm)
    assert now == Coefficients(0.1, 0.01)
    seen = {"kl/completion_k1": 60.0, "kl/token_k1": 0.1, "entropy": 0.1}
    then = next_coefficients(now, algorithm, seen, completions=1000, too_far=None)
    assert then == Coefficients(pytest.approx(0.102), pytest.approx(0.015))
    assert next_coefficients(now, algorithm, {}, completions=1000, too_far=None) == now
    with_kl = replace(algorithm, kl=KL(coef=0.1))
    assert next_coefficients(now, with_kl, seen, completions=1000, too_far=True).kl == pytest.approx(0.15)


def test_a_resume_keeps_only_the_coefficients_that_are_adapted() -> None:
    saved = Coefficients(kl=0.3, entropy=0.02)
    fixed = replace(PRESETS["grpo"], kl=KL(coef=0.1), entropy=Entropy(coef=0.001))
    # The config may have changed since the checkpoint.
    assert resumed_coefficients(saved, fixed, guarded=False) == Coefficients(0.1, 0.001)
    assert resumed_coefficients(saved, fixed, guarded=True) == Coefficients(0.3, 0.001)
    adapted = replace(fixed, kl=KL(coef=0.1, target=6.0), entropy=Entropy(coef=0.0, target=0.2))
    assert resumed_coefficients(saved, adapted, guarded=False) == saved


def test_informative_compares_rewards_and_not_their_std() -> None:
    def kept(*rewards: float) -> bool:
        return informative(group(rewards).dead)

    assert not kept(*[0.7] * 7)
    assert kept(0.7, 0.7, 0.7 + 1e-15)
    assert not kept(1.0)


def test_pass_rate_band_is_closed_at_both_ends() -> None:
    half = torch.tensor([1.0, 1.0, 0.0, 0.0])
    assert pass_rate_band(half, low=0.5, high=0.8)
    assert pass_rate_band(half, low=0.2, high=0.5)
    assert not pass_rate_band(half, low=0.6, high=0.8)
    assert not pass_rate_band(half, low=0.2, high=0.4)
    # PRIME's [.2, .8] keeps 1 of 5 and 4 of 5.
    assert pass_rate_band(torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0]))
    assert pass_rate_band(torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0]))
    assert not pass_rate_band(torch.zeros(4)) and not pass_rate_band(torch.ones(4))
    # A reward passes above the threshold, not at it.
    assert not pass_rate_band(torch.tensor([0.5, 0.5]))
    assert pass_rate_band(torch.tensor([0.5, 0.2]), threshold=0.3)
