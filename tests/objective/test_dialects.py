"""A dialect gives the framework's own advantages, loss and gradient on the same numbers.

They are stated again here, row by row, from their sources: verl 0.9.1 (PyPI, trainer/ppo/core_algos.py),
OpenRLHF 0.11.2 (PyPI, models/loss.py, trainer/ppo_utils/experience_maker.py), NeMo-RL v0.7.0 (commit
81aa43dd, algorithms/advantage_estimator.py and loss/loss_functions.py). `conformance/adapters/trl_1_16.py`
calls TRL's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import mean, stdev
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from covey.config.algorithm import build_algorithm, describe
from covey.learner.advantage import with_advantages
from covey.learner.batching import collate
from covey.objective.algorithms import Algorithm
from covey.objective.data import LossInputs
from covey.objective.dialects import DIALECTS
from covey.objective.loss import policy_loss
from covey.objective.reductions import Totals
from covey.types import Baselines
from covey_verify.errors import ConfigError
from tests.fakes import group

EXACT = {"rtol": 1e-9, "atol": 1e-11}
GREEDY = 0.4
Numbers = Sequence[float]


@dataclass(frozen=True)
class Step:
    """An optimizer step: rewards and lengths group by group, log-probs of every token, a masked row."""

    rewards: tuple[tuple[float, ...], ...] = ((1.0, 0.0, 0.0, 0.5), (0.7,), (1.0, 1.0, 0.0))
    lengths: tuple[tuple[int, ...], ...] = ((5, 3, 6, 2), (4,), (1, 6, 3))
    masked: tuple[int, ...] = ()

    @property
    def mask(self) -> Tensor:
        counts = [0 if i in self.masked else n for i, n in enumerate(n for own in self.lengths for n in own)]
        return torch.arange(6) < torch.tensor(counts)[:, None]

    def drawn(self, seed: int) -> Tensor:
        return torch.from_numpy(np.random.default_rng(seed).normal(size=self.mask.shape))

    @property
    def old(self) -> Tensor:
        return -(0.7 * self.drawn(1) - 0.3).exp()

    @property
    def now(self) -> Tensor:
        return self.old + 0.8 * self.drawn(2)

    @property
    def ref(self) -> Tensor:
        far = torch.zeros(self.mask.shape, dtype=torch.float64)
        far[0, 1], far[2, 0] = 4.0, -4.0  # k3 of -4 is 49.6, beyond the bound of 10
        return self.old + 0.5 * self.drawn(3) + far


def covey(algorithm: Algorithm, step: Step, patch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor, Tensor]:
    """Advantages (N, T), loss and gradient as a run computes them, in float64 where it stores float32."""
    patch.setattr(Tensor, "float", Tensor.double)
    groups = [
        replace(group(r, n, name=f"g{g}"), baselines=Baselines(greedy_reward=GREEDY))
        for g, (r, n) in enumerate(zip(step.rewards, step.lengths, strict=True))
    ]
    batch = replace(collate(groups), mask=step.mask, old_logprobs=step.old, ref_logprobs=step.ref)
    batch = with_advantages(batch, groups, algorithm)
    now, totals = step.now.requires_grad_(), batch.totals(max_tokens=9)
    inputs = LossInputs(
        logprobs=now,
        mask=batch.mask,
        advantages=batch.advantages,
        old_logprobs=step.old,
        ref_logprobs=step.ref,
        totals=totals,
        group_tokens=batch.group_tokens,
    )
    loss = policy_loss(algorithm, inputs).total
    return batch.advantages, loss.detach(), torch.autograd.grad(loss, now)[0]


def same(
    patch: pytest.MonkeyPatch,
    spec: dict[str, Any],
    step: Step,
    advantage: Callable[[Step], Tensor],
    loss: Callable[[Tensor, Tensor, Step], Tensor],
) -> None:
    """covey under a dialect against the peer's advantages and its loss of log-probs."""
    found = covey(build_algorithm(spec), step, patch)
    due = advantage(step) * step.mask
    now = step.now.requires_grad_()
    value = loss(now, due, step)
    torch.testing.assert_close(found[0], due, **EXACT)
    torch.testing.assert_close(found[1], value.detach(), **EXACT)
    torch.testing.assert_close(found[2], torch.autograd.grad(value, now)[0], **EXACT)


def each(step: Step, of: Callable[[Numbers, Numbers], Numbers]) -> Tensor:
    """A number for every completion of a group, on all tokens."""
    flat = [v for r, n in zip(step.rewards, step.lengths, strict=True) for v in of(r, n)]
    return torch.tensor(flat, dtype=torch.float64)[:, None].expand(step.mask.shape)


def to_go(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).flip(-1).cumsum(-1).flip(-1)


# --- verl -----------------------------------------------------------------------------------------


def verl_whiten(values: Tensor, mask: Tensor) -> Tensor:
    n = mask.sum()
    centre = (values * mask).sum() / (n + 1e-8)
    spread = ((values - centre).square() * mask).sum() / (n + 1e-8) * n / (n - 1)
    return (values - centre) / (spread + 1e-8).sqrt()


def verl_loss(
    now: Tensor, a: Tensor, step: Step, low: float = 0.2, high: float = 0.2, rows: bool = False
) -> Tensor:
    rho = (now - step.old).clamp(-20, 20).exp()
    pessimistic = torch.maximum(-a * rho, -a * rho.clamp(1 - low, 1 + high))
    each_token = torch.where(a < 0, torch.minimum(-3.0 * a, pessimistic), pessimistic)
    return verl_rows(each_token, step) if rows else (each_token * step.mask).sum() / step.mask.sum()


def verl_rows(values: Tensor, step: Step) -> Tensor:
    counts = step.mask.sum(-1).double()
    return ((values * step.mask).sum(-1) / (counts + 1e-8))[counts > 0].mean()


def verl_gspo(now: Tensor, a: Tensor, step: Step) -> Tensor:
    mean_gap = ((now - step.old) * step.mask).sum(-1, keepdim=True) / step.mask.sum(-1, keepdim=True)
    s = (now - now.detach() + mean_gap.detach()).exp()
    return verl_rows(torch.maximum(-a * s, -a * s.clamp(1 - 3e-4, 1 + 4e-4)), step)


def verl_cispo(now: Tensor, a: Tensor, step: Step) -> Tensor:
    weight = (now - step.old).exp().clamp(0.8, 1.2).detach()
    return -(weight * a * now * step.mask).sum() / step.mask.sum()


def verl_sapo(now: Tensor, a: Tensor, step: Step) -> Tensor:
    """A sigmoid around a ratio of 1 for the clip, steeper where A is not positive; always by completion."""
    rho = (now - step.old).clamp(-20, 20).exp()
    tau = torch.full_like(a, 1.05).where(a <= 0, 1.0)
    return verl_rows(-4 / tau / (1 + (-tau * (rho - 1)).exp()) * a, step)


def verl_dro(beta: float) -> Callable[..., Tensor]:
    """Half beta times the squared log-ratio, less A log pi; beta has no default there."""

    def loss(now: Tensor, a: Tensor, step: Step) -> Tensor:
        values = beta / 2 * (now - step.old) ** 2 - a * now
        return (values * step.mask).sum() / step.mask.sum()

    return loss


def verl_k3(now: Tensor, a: Tensor, step: Step) -> Tensor:
    gap = (step.ref - now).clamp(-20, 20)
    kl = (gap.exp() - gap - 1).clamp(-10, 10)
    return verl_loss(now, a, step) + 0.05 * (kl * step.mask).sum() / step.mask.sum()


def zscore(r: Numbers, _: Numbers = ()) -> Numbers:
    if len(r) == 1:
        return [r[0] / (1 + 1e-6)]
    return [(x - mean(r)) / (stdev(r) + 1e-6) for x in r]


def centred(r: Numbers, _: Numbers = ()) -> Numbers:
    return [x - mean(r) for x in r] if len(r) > 1 else r


def siblings(r: Numbers, _: Numbers = ()) -> Numbers:
    return [(len(r) * x - sum(r)) / (len(r) - 1) for x in r] if len(r) > 1 else r


def by_length(r: Numbers, n: Numbers) -> Numbers:
    baseline = sum(a * b for a, b in zip(r, n, strict=True)) / sum(n) if len(r) > 1 else 0.0
    return [x - baseline for x in r]


def verl_gpg(step: Step) -> Tensor:
    flat = [x for r in step.rewards for x in r]
    return each(step, centred) * len(flat) / sum(x != 0 for x in flat)


VERL: dict[str, tuple[Callable[[Step], Tensor], Callable[..., Tensor]]] = {
    "grpo": (lambda s: each(s, zscore), verl_loss),
    "dapo": (lambda s: each(s, zscore), lambda now, a, s: verl_loss(now, a, s, high=0.28)),
    "rloo": (lambda s: each(s, siblings), verl_loss),
    "opo": (lambda s: each(s, by_length), verl_loss),
    "remax": (lambda s: each(s, lambda r, _: [x - GREEDY for x in r]), verl_loss),
    "reinforce_pp": (lambda s: verl_whiten(each(s, lambda r, _: r), s.mask), verl_loss),
    "reinforce_pp_baseline": (lambda s: verl_whiten(each(s, centred), s.mask), verl_loss),
    "gdpo": (lambda s: verl_whiten(each(s, zscore), s.mask), verl_loss),
    "gpg": (verl_gpg, lambda now, a, s: -(now * a * s.mask).sum() / s.mask.sum()),
    "gspo": (lambda s: each(s, zscore), verl_gspo),
    "cispo": (lambda s: each(s, zscore), verl_cispo),
    "dr_grpo": (
        lambda s: each(s, centred),
        lambda now, a, s: verl_loss(now, a, s) * s.mask.sum() / s.mask.any(-1).sum() / 9,
    ),
    "dual_clip": (lambda s: each(s, zscore), verl_loss),
    "sapo": (lambda s: each(s, zscore), verl_sapo),
    "dro": (lambda s: each(s, centred), verl_dro(1.0)),
}


@pytest.mark.parametrize("name", VERL)
def test_verl(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    same(monkeypatch, {"name": name, "dialect": "verl-0.9.1"}, Step(), *VERL[name])


def test_verls_tails_and_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its k3 ends at 10; a fully masked row is no row of ``agg_loss``."""
    spec = {"name": "grpo", "dialect": "verl-0.9.1", "kl": {"coef": 0.05}}
    same(monkeypatch, spec, Step(), VERL["grpo"][0], verl_k3)
    spec = {"name": "grpo", "dialect": "verl-0.9.1", "reduce": "sequence_mean"}
    rows = lambda now, a, s: verl_loss(now, a, s, rows=True)
    same(monkeypatch, spec, Step(masked=(2, 5)), VERL["grpo"][0], rows)
    for name in ("sapo", "dro"):
        same(monkeypatch, {"name": name, "dialect": "verl-0.9.1"}, Step(masked=(2, 5)), *VERL[name])
    spec = {"name": "dro", "dialect": "verl-0.9.1", "surrogate": {"beta": 0.3}}
    same(monkeypatch, spec, Step(), VERL["dro"][0], verl_dro(0.3))


# --- OpenRLHF -------------------------------------------------------------------------------------

EVEN = Step(rewards=((1.0, 0.0, 0.0, 0.5), (1.0, 1.0, 0.0, 0.2)), lengths=((5, 3, 6, 2), (4, 1, 6, 3)))
"""It reshapes rewards to (prompts, samples): no single completions."""


def openrlhf_whiten(values: Tensor, mask: Tensor) -> Tensor:
    centre = (values * mask).sum() / mask.sum()
    spread = ((values - centre).square() * mask).sum() / mask.sum()
    return (values - centre) / spread.clamp(min=1e-8).sqrt()


def openrlhf(of: Callable[[Numbers, Numbers], Numbers], whiten: bool = False) -> Callable[[Step], Tensor]:
    """The shaped reward at the last token, less .01 k1 at each, summed to the end."""

    def advantage(step: Step) -> Tensor:
        k1 = (step.old - step.ref).clamp(-10, 10)
        values = each(step, of) - 0.01 * to_go(k1, step.mask)
        return openrlhf_whiten(values, step.mask) if whiten else values

    return advantage


def plain_clip(now: Tensor, a: Tensor, step: Step, high: float = 0.2) -> Tensor:
    rho = (now - step.old).clamp(-20, 20).exp()
    return -(torch.minimum(rho * a, rho.clamp(0.8, 1 + high) * a) * step.mask).sum() / step.mask.sum()


def openrlhf_zscore(r: Numbers, _: Numbers) -> Numbers:
    return [(x - mean(r)) / (stdev(r) + 1e-9) for x in r]


OPENRLHF = {
    "grpo": openrlhf(openrlhf_zscore),
    "dr_grpo": openrlhf(centred),
    "rloo": openrlhf(siblings),
    "reinforce": openrlhf(lambda r, _: r, whiten=True),
    "reinforce_pp": openrlhf(lambda r, _: r, whiten=True),
    "reinforce_pp_baseline": openrlhf(centred, whiten=True),
}


@pytest.mark.parametrize("name", OPENRLHF)
def test_openrlhf(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    same(monkeypatch, {"name": name, "dialect": "openrlhf-0.11"}, EVEN, OPENRLHF[name], plain_clip)


def test_openrlhfs_gamma_gspo_and_dapo(monkeypatch: pytest.MonkeyPatch) -> None:
    def discounted(step: Step) -> Tensor:
        paid = -0.01 * (step.old - step.ref).clamp(-10, 10) * step.mask
        rewards = each(step, lambda r, _: r)[:, 0]
        values = torch.zeros_like(paid)
        for i, count in enumerate(step.mask.sum(-1).tolist()):
            later = 0.0
            for t in range(count - 1, -1, -1):
                later = paid[i, t] + (rewards[i] if t == count - 1 else 0.0) + 0.9 * later
                values[i, t] = later
        return openrlhf_whiten(values, step.mask)

    spec = {"name": "reinforce", "dialect": "openrlhf-0.11", "advantage": {"gamma": 0.9}}
    same(monkeypatch, spec, EVEN, discounted, plain_clip)

    def gspo(now: Tensor, a: Tensor, step: Step) -> Tensor:
        count = step.mask.sum(-1, keepdim=True).double()
        s = (((now - step.old) * step.mask).sum(-1, keepdim=True) / count).exp()
        values = -torch.minimum(s * a, s.clamp(1 - 3e-4, 1 + 4e-4) * a)
        return ((values * step.mask).sum(-1) / (count[:, 0] + 1e-8)).mean()

    spec = {"name": "gspo", "dialect": "openrlhf-0.11"}
    same(monkeypatch, spec, EVEN, lambda s: each(s, openrlhf_zscore), gspo)
    spec = {"name": "dapo", "dialect": "openrlhf-0.11"}
    higher = lambda now, a, s: plain_clip(now, a, s, high=0.28)
    same(monkeypatch, spec, EVEN, lambda s: each(s, openrlhf_zscore), higher)


# --- NeMo-RL --------------------------------------------------------------------------------------


def nemo_zscore(r: Numbers, _: Numbers) -> Numbers:
    """Mean and sample std of the siblings; undivided where that std is 0; a lone one is its own baseline."""
    if len(r) == 1:
        return [0.0]
    found = []
    for i, x in enumerate(r):
        others = [*r[:i], *r[i + 1 :]]
        spread = stdev(others) if len(others) > 1 else 0.0
        found.append((x - mean(others)) / (spread + 1e-6 if spread > 0 else 1.0))
    return found


def nemo_kl(now: Tensor, step: Step) -> Tensor:
    """.01 of a token mean of k3 times exp(l - sg l), clamped after that product."""
    gap = (step.ref - now).clamp(-20, 20)
    kl = ((now - now.detach()).exp() * (gap.exp() - 1 - gap)).clamp(-10, 10)
    return 0.01 * (kl * step.mask).sum() / (step.mask.sum() + 1e-8)


def nemo_loss(now: Tensor, a: Tensor, step: Step) -> Tensor:
    return nemo_clip(now, a, step, high=0.2) + nemo_kl(now, step)


def nemo_clip(now: Tensor, a: Tensor, step: Step, high: float) -> Tensor:
    rho = (now - step.old).exp()
    clipped = torch.maximum(-a * rho, -a * rho.clamp(0.8, 1 + high))
    return (clipped * step.mask).sum() / (step.mask.sum() + 1e-8)


def nemo_gspo(added: float) -> Callable[..., Tensor]:
    """``added``: to a completion's tokens in its ratio, and to the number of completions. 1e-8 there."""

    def loss(now: Tensor, a: Tensor, step: Step) -> Tensor:
        count, rows = step.mask.sum(-1).double().clamp(min=1), step.mask.any(-1).double()
        s = (((now - step.old) * step.mask).sum(-1) / (count + added)).exp()[:, None]
        values = torch.maximum(-a * s, -a * s.clamp(1 - 3e-4, 1 + 4e-4))
        return ((values * step.mask).sum(-1) / (count + 1e-8) * rows).sum() / (rows.sum() + added)

    return loss


def nemo_logprob(weighted: bool) -> Callable[..., Tensor]:
    def loss(now: Tensor, a: Tensor, step: Step) -> Tensor:
        weight = (now - step.old).exp().clamp(0.8, 1.2).detach() if weighted else 1.0
        return -(weight * a * now * step.mask).sum() / (step.mask.sum() + 1e-8) + nemo_kl(now, step)

    return loss


def nemo_gdpo(step: Step) -> Tensor:
    values = each(step, nemo_zscore)
    return (values - values[:, 0].mean()) / values[:, 0].std()


NEMO: dict[str, tuple[Callable[[Step], Tensor], Callable[..., Tensor]]] = {
    "grpo": (lambda s: each(s, nemo_zscore), nemo_loss),
    "gdpo": (nemo_gdpo, nemo_loss),
    "dapo": (lambda s: each(s, nemo_zscore), lambda now, a, s: nemo_clip(now, a, s, high=0.28)),
    "gspo": (lambda s: each(s, nemo_zscore), nemo_gspo(added=0.0)),
    "rloo": (lambda s: each(s, lambda r, _: siblings(r) if len(r) > 1 else [0.0]), nemo_logprob(False)),
    "cispo": (lambda s: each(s, nemo_zscore), nemo_logprob(True)),
    "reinforce_pp": (lambda s: openrlhf_whiten(each(s, lambda r, _: r), s.mask), nemo_loss),
    "reinforce_pp_baseline": (
        lambda s: openrlhf_whiten(each(s, lambda r, _: [x - mean(r) for x in r]), s.mask),
        nemo_loss,
    ),
}


@pytest.mark.parametrize("name", NEMO)
def test_nemo_rl(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    same(monkeypatch, {"name": name, "dialect": "nemo-rl-0.7"}, Step(), *NEMO[name])


def test_what_nemo_rl_adds_to_counts_is_below_1e_8() -> None:
    step = Step(masked=(2, 5))
    a = each(step, nemo_zscore) * step.mask
    without, due = (float(nemo_gspo(added)(step.now, a, step)) for added in (0.0, 1e-8))
    assert without == pytest.approx(due, abs=1e-8)


# --- the setting itself ---------------------------------------------------------------------------


def test_numbers_by_hand() -> None:
    """(1, 0, 0, 0): mean 1/4, sample std 1/2. Siblings of the 1 tie; those of a 0 have std 1/sqrt 3."""
    rewards = torch.tensor([1.0, 0, 0, 0], dtype=torch.float64)
    due = {
        "trl-1.16": (0.75 / 0.5001, -0.25 / 0.5001),
        "verl-0.9.1": (0.75 / 0.500001, -0.25 / 0.500001),
        "openrlhf-0.11": (0.75 / 0.500000001, -0.25 / 0.500000001),
        "nemo-rl-0.7": (1.0, -1 / 3 / (1 / math.sqrt(3) + 1e-6)),
    }
    assert set(due) == set(DIALECTS)
    for name, (one, zero) in due.items():
        estimator = build_algorithm({"dialect": name}).advantage
        found = estimator.function(rewards, **estimator.settings)
        assert found.tolist() == pytest.approx([one, zero, zero, zero], abs=1e-12)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"name": "grpo", "reduce": "sequence_mean"}, -3 / 4),
        ({"name": "rloo"}, -3 / 4),
        ({"name": "luspo"}, -6 / 4),
        ({"name": "dr_grpo"}, -6 / 40),
    ],
)
def test_trl_divides_by_completions_of_which_nothing_is_trained_too(
    spec: dict[str, object], expected: float
) -> None:
    """By hand, for where TRL is not installed. Lengths 2, 1, 3 and a masked one; ratios and advantages 1."""
    mask = torch.arange(3) < torch.tensor([2, 1, 3, 0])[:, None]
    algorithm = build_algorithm({"dialect": "trl-1.16", **spec})
    loss = policy_loss(
        replace(algorithm, kl=None),
        LossInputs(
            logprobs=torch.zeros(4, 3, dtype=torch.float64),
            old_logprobs=torch.zeros(4, 3, dtype=torch.float64),
            mask=mask,
            advantages=mask.double(),
            totals=Totals(tokens=6, completions=3, prompts=1, max_tokens=10, rows=4),
            group_tokens=torch.full((4,), 6),
        ),
    )
    assert loss.total.item() == pytest.approx(expected)


def test_options_win_over_the_dialect() -> None:
    verl = {"name": "grpo", "dialect": "verl-0.9.1"}
    given = build_algorithm({**verl, "advantage": {"eps": 1e-3}, "surrogate": {"dual_clip": None}})
    assert given.advantage.all_settings == {"ddof": 1, "eps": 1e-3, "single": "reward"}
    assert given.surrogate.settings["dual_clip"] is None
    assert build_algorithm({**verl, "name": "dapo"}).surrogate.settings == {
        "clip_low": 0.2,
        "clip_high": 0.28,
        "dual_clip": 3.0,
    }
    # Another function brings the framework's convention along; a KL its estimator, place and bound.
    other = build_algorithm({**verl, "advantage": "group_centered", "kl": 0.1, "reduce": "sequence_mean"})
    assert other.advantage.settings == {"single": "reward"}
    assert other.reduce.settings == {"eps": 1e-8}
    assert other.kl is not None
    assert (other.kl.coef, other.kl.bound, other.kl.gradient) == (0.1, 10.0, "formula")
    named = build_algorithm({"name": "grpo", "dialect": "nemo-rl-0.7", "advantage": {"name": "group_zscore"}})
    assert named.advantage.name == "group_zscore"


@pytest.mark.parametrize("name", DIALECTS)
def test_every_dialect_can_be_written_out(name: str) -> None:
    for preset in DIALECTS[name].algorithms:
        algorithm = build_algorithm({"name": preset, "dialect": name})
        assert build_algorithm(describe(algorithm)) == algorithm
        assert DIALECTS[name].read in algorithm.paper


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"dialect": "verl"}, "known: trl-1.16, verl-0.9.1"),
        ({"dialect": 3}, "unknown"),
        ({"name": "max_rl", "dialect": "verl-0.9.1"}, "has no algorithm max_rl"),
    ],
)
def test_what_was_not_read_is_refused(spec: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build_algorithm(spec)
