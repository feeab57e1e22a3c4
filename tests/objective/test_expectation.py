"""Exact expectations: every possible group of a small softmax policy, weighted by its probability.

Two worlds: one token out of four, and two tokens out of three each. What an estimator is said to
follow, it must follow to rounding: no sampling, no tolerance for luck.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from covey.learner.advantage import with_advantages
from covey.learner.batching import collate
from covey.objective import advantages, corrections, penalties, ratios, surrogates
from covey.objective.algorithms import PRESETS, Algorithm
from covey.objective.axis_function import bind
from covey.objective.data import LossInputs
from covey.objective.loss import policy_loss
from covey.objective.penalties import KL
from covey.types import Baselines, Completion, Group, Problem

REINFORCE = PRESETS["reinforce"]
ONE = [(a,) for a in range(4)]
TWO = [(a, b) for a in range(3) for b in range(3)]
ROWS = {1: (1, 4), 2: (4, 3)}
"""Tokens of a completion -> shape of the policy's parameters."""

Outcome = tuple[int, ...]


def parameters(tokens: int, seed: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=ROWS[tokens])).requires_grad_()


def logprobs(theta: Tensor, outcome: Outcome) -> Tensor:
    """(T,) log pi of each token: the first from row 0, the second from the row of the first."""
    rows = (0, *(1 + a for a in outcome[:-1]))
    return torch.stack([theta[row].log_softmax(-1)[token] for row, token in zip(rows, outcome, strict=True)])


def value(outcome: Outcome) -> float:
    """A made-up reward, the same for everybody."""
    return float(np.random.default_rng([9, *outcome]).normal() + 2.0)


def gradient_of(what: Tensor, theta: Tensor) -> Tensor:
    return torch.autograd.grad(what, theta, retain_graph=True)[0]


def true_gradient(theta: Tensor, outcomes: Sequence[Outcome], reward: Callable[[Outcome], float]) -> Tensor:
    """-d E[r] / d theta."""
    return gradient_of(-sum(logprobs(theta, o).sum().exp() * reward(o) for o in outcomes), theta)


def all_losses(
    algorithm: Algorithm,
    theta: Tensor,
    outcomes: Sequence[Outcome],
    size: int = 2,
    reward: Callable[[Outcome], float] = value,
    reference: Tensor | None = None,
    old: Tensor | None = None,
    sampler: Tensor | None = None,
    greedy: float | None = None,
) -> list[tuple[float, Tensor]]:
    """(probability, loss) of every group of ``size`` outcomes that the sampler can draw."""
    old = theta if old is None else old
    sampler = old if sampler is None else sampler
    reference = theta if reference is None else reference
    found = []
    for group in product(outcomes, repeat=size):
        table = {
            n: torch.stack([logprobs(p, o).detach() for o in group])
            for n, p in (("old_logprobs", old), ("sampler_logprobs", sampler), ("ref_logprobs", reference))
        }
        completions = tuple(Completion(np.array(o), np.zeros(len(o), np.float32), "", "stop") for o in group)
        scored = Group(
            Problem("p", "p"),
            np.array([1]),
            completions,
            np.array([reward(o) for o in group]),
            baselines=Baselines(greedy_reward=greedy),
        )
        batch = with_advantages(replace(collate([scored]), **table), [scored], algorithm)
        inputs = LossInputs(
            logprobs=torch.stack([logprobs(theta, o) for o in group]),
            mask=batch.mask,
            advantages=batch.advantages.double(),
            totals=batch.totals(2),
            group_tokens=batch.group_tokens,
            full_kl=torch.stack([exact_kl(theta, reference, o) for o in group]),
            **table,
        )
        found.append((float(table["sampler_logprobs"].sum().exp()), policy_loss(algorithm, inputs).total))
    assert sum(chance for chance, _ in found) == pytest.approx(1.0)
    return found


def exact_kl(theta: Tensor, reference: Tensor, outcome: Outcome) -> Tensor:
    """(T,) sum_v pi(v) log(pi(v) / ref(v)) at every token of an outcome."""
    rows = (0, *(1 + a for a in outcome[:-1]))
    pairs = [(theta[row].log_softmax(-1), reference[row].detach().log_softmax(-1)) for row in rows]
    return torch.stack([(p.exp() * (p - q)).sum() for p, q in pairs])


def expected(algorithm: Algorithm, theta: Tensor, outcomes: Sequence[Outcome], **more) -> Tensor:
    losses = all_losses(algorithm, theta, outcomes, **more)
    return gradient_of(sum(chance * loss for chance, loss in losses), theta)


def same(a: Tensor, b: Tensor) -> bool:
    # Advantages are kept in float32.
    return torch.allclose(a, b, rtol=1e-6, atol=1e-7)


# --- the policy gradient --------------------------------------------------------------------------


@pytest.mark.parametrize("outcomes", [ONE, TWO], ids=["one token", "two tokens"])
@pytest.mark.parametrize(
    ("name", "share"),
    # The group's own mean is subtracted from itself too: (G - 1) / G of the gradient is left.
    [("reinforce", 1.0), ("rloo", 1.0), ("remax", 1.0), ("opo", 0.5)],
)
def test_unbiased_estimators_follow_the_true_gradient(name: str, share: float, outcomes) -> None:
    algorithm = replace(PRESETS[name], kl=None, reduce=REINFORCE.reduce)
    theta = parameters(len(outcomes[0]), 1)
    got = expected(algorithm, theta, outcomes, greedy=1.7)
    assert same(got, share * true_gradient(theta, outcomes, value))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_group_mean_shrinks_the_gradient_by_its_self_inclusion(size: int) -> None:
    algorithm = replace(REINFORCE, advantage=bind(advantages.group_centered))
    theta = parameters(1, 2)
    shrunk = (size - 1) / size * true_gradient(theta, ONE, value)
    assert same(expected(algorithm, theta, ONE, size=size), shrunk)


def test_a_baseline_keeps_the_mean_and_lowers_the_variance() -> None:
    theta = parameters(1, 3)
    spread = {}
    for name in ("reward", "leave_one_out"):
        algorithm = replace(REINFORCE, advantage=bind(getattr(advantages, name)))
        parts = [(c, gradient_of(loss, theta)) for c, loss in all_losses(algorithm, theta, ONE, size=3)]
        mean = sum(c * g for c, g in parts)
        spread[name] = float(sum(c * (g - mean).square().sum() for c, g in parts))
        assert same(mean, true_gradient(theta, ONE, value))
    assert spread["leave_one_out"] < 0.7 * spread["reward"]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_max_rl_follows_the_truncated_log_likelihood(size: int) -> None:
    # log p = -sum_k (1 - p)^k / k; cut after G - 1 terms its gradient is p' sum_{k < G} (1 - p)^(k - 1).
    theta = parameters(1, 4)
    success = lambda outcome: float(outcome[0] < 2)
    p = theta[0].softmax(-1)[:2].sum()
    cut = sum((1 - p.detach()) ** (k - 1) for k in range(1, size))
    algorithm = replace(PRESETS["max_rl"], reduce=REINFORCE.reduce)
    algorithm = replace(algorithm, advantage=bind(advantages.mean_normalized, eps=0.0))
    assert same(expected(algorithm, theta, ONE, size=size, reward=success), -cut * gradient_of(p, theta))


# --- off-policy -----------------------------------------------------------------------------------


def test_ratios_correct_for_the_policy_that_sampled() -> None:
    unclipped = replace(REINFORCE, surrogate=bind(surrogates.unclipped), ratio=bind(ratios.token))
    by_response = replace(unclipped, ratio=bind(ratios.completion), reduce=PRESETS["grpo"].reduce)
    theta, old = parameters(1, 5), parameters(1, 6)
    assert same(expected(unclipped, theta, ONE, old=old), true_gradient(theta, ONE, value))
    theta, old = parameters(2, 5), parameters(2, 6)
    truth = true_gradient(theta, TWO, value)
    assert same(expected(by_response, theta, TWO, old=old), truth)
    assert not same(expected(unclipped, theta, TWO, old=old), truth)


def test_the_decoupled_weight_corrects_for_the_sampler() -> None:
    theta, old, sampler = (parameters(1, seed) for seed in (7, 8, 9))
    algorithm = replace(REINFORCE, ratio=bind(ratios.token), correction=(bind(corrections.decoupled),))
    truth = true_gradient(theta, ONE, value)
    assert same(expected(algorithm, theta, ONE, old=old, sampler=sampler), truth)
    assert not same(expected(replace(algorithm, correction=()), theta, ONE, old=old, sampler=sampler), truth)


# --- what each KL term pulls at -------------------------------------------------------------------


def reverse_kl(theta: Tensor, reference: Tensor, outcomes: Sequence[Outcome]) -> Tensor:
    """KL(pi || ref) of whole completions."""
    pairs = [(logprobs(theta, o).sum(), logprobs(reference, o).sum().detach()) for o in outcomes]
    return sum(p.exp() * (p - q) for p, q in pairs)


def forward_kl(theta: Tensor, reference: Tensor, outcomes: Sequence[Outcome]) -> Tensor:
    """KL(ref || pi) of whole completions."""
    pairs = [(logprobs(theta, o).sum(), logprobs(reference, o).sum().detach()) for o in outcomes]
    return sum(q.exp() * (q - p) for p, q in pairs)


def nothing(theta: Tensor, *_: object) -> Tensor:
    return 0 * theta.sum()


@pytest.mark.parametrize(
    ("estimator", "settings", "followed"),
    [
        (penalties.k1, {}, nothing),
        (penalties.k1, {"gradient": "ratio"}, reverse_kl),
        (penalties.k1, {"gradient": "straight_through"}, reverse_kl),
        (penalties.k2, {}, reverse_kl),
        (penalties.k3, {}, forward_kl),
        (penalties.k3, {"gradient": "ratio"}, reverse_kl),
        (penalties.k3, {"gradient": "straight_through"}, reverse_kl),
        (penalties.full, {}, reverse_kl),
        (penalties.k1, {"place": "reward"}, reverse_kl),
        (penalties.k1, {"place": "reward", "level": "completion"}, reverse_kl),
    ],
)
def test_each_kl_mode_follows_the_gradient_it_claims(estimator, settings, followed) -> None:
    theta, reference = parameters(1, 10), parameters(1, 11)
    kl = KL(bind(estimator), coef=0.3, **settings)
    algorithm = replace(REINFORCE, kl=kl)
    got = expected(algorithm, theta, ONE, reference=reference, reward=lambda _: 0.0)
    assert same(got, 0.3 * gradient_of(followed(theta, reference, ONE), theta))
    assert followed is nothing or got.abs().max() > 0.01


@pytest.mark.parametrize("level", ["token", "completion"])
def test_kl_in_the_reward_is_exact_for_whole_completions(level: str) -> None:
    theta, reference = parameters(2, 12), parameters(2, 13)
    algorithm = replace(REINFORCE, kl=KL(bind(penalties.k1), coef=0.3, place="reward", level=level))
    truth = true_gradient(theta, TWO, value) + 0.3 * gradient_of(reverse_kl(theta, reference, TWO), theta)
    assert same(expected(algorithm, theta, TWO, reference=reference), truth)


def test_a_token_loss_misses_what_a_token_does_to_later_ones() -> None:
    # arXiv 2506.09477: the same k2 that is right for one token is not for two.
    theta, reference = parameters(2, 12), parameters(2, 13)
    pull = 0.3 * gradient_of(reverse_kl(theta, reference, TWO), theta)
    by_token, by_response = (
        expected(
            replace(REINFORCE, kl=KL(bind(penalties.k2), coef=0.3, level=level), reduce=reduce),
            theta,
            TWO,
            reference=reference,
            reward=lambda _: 0.0,
        )
        for level, reduce in (("token", REINFORCE.reduce), ("completion", PRESETS["grpo"].reduce))
    )
    assert not same(by_token, pull)
    assert same(by_response, pull)


@pytest.mark.parametrize("estimator", [penalties.k1, penalties.k3])
def test_k1_and_k3_are_unbiased_values_and_k2_is_not(estimator) -> None:
    theta, reference = parameters(1, 14).detach(), parameters(1, 15).detach()
    difference = theta[0].log_softmax(-1) - reference[0].log_softmax(-1)
    mean = lambda k: float((theta[0].softmax(-1) * k(difference)).sum())
    exact = float(reverse_kl(theta, reference, ONE))
    assert mean(estimator) == pytest.approx(exact, rel=1e-12)
    assert mean(penalties.k2) != pytest.approx(exact, rel=1e-3)
