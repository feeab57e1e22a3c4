"""Checks of rewards on their way to returns: their places, the KL in them, their sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from statistics import pvariance
from typing import NamedTuple

import torch
from torch import Tensor

from covey.audit.checks.check import Fault, MissingField
from covey.audit.checks.losses import kl_of_the_loss_is_exchanged
from covey.audit.checks.rescored import sum_of
from covey.audit.checks.terms import kl_has_its_arguments_exchanged
from covey.audit.checks.tokens import location
from covey.audit.frameworks import FRAMEWORKS
from covey.audit.record import AuditRecord, Numbers, Use
from covey.objective import penalties
from covey.objective.value import value_targets

MIN_COMPLETIONS = 4
"""Fewest completions that must show a fault."""
ESTIMATORS = {"kl": penalties.k1, "mse": penalties.k2, "low_var_kl": penalties.k3, "abs": penalties.absolute}
ESTIMATORS |= {"k1": penalties.k1, "k2": penalties.k2, "k3": penalties.k3}
"""Names of verl and OpenRLHF -> covey's estimator of a KL."""
MIN_SCORE = 1e-4
"""Smaller scores are rounding errors of a KL that was added and subtracted."""
DROWNING_FACTOR = 10.0
"""Multiple of the variance of scores above which a KL drowns them."""
BOUND = 10.0
"""The bound at which both frameworks clamp the KL of a token; other loops may not clamp."""
SUMS = {
    "verl": ("gae", "reinforce_plus_plus"),
    "openrlhf": ("gae", "reinforce", "reinforce_baseline", "rloo", "group_norm", "dr_grpo"),
}
"""Framework -> its estimators whose returns are sums of the rewards of later tokens."""


def rewards_are_on_padding(record: AuditRecord) -> Fault | None:
    """A reward is placed after the last token of a completion."""
    shown = []
    for use in record.uses:
        scores = use.row.token_scores or ()
        behind = [
            n for n in range(len(use.sample.ids or ()), len(scores)) if abs(scores[n] or 0.0) > MIN_SCORE
        ]
        shown += [(use, behind[0])] if behind and use.sample.ids else []
    if len(shown) < MIN_COMPLETIONS:
        return None
    use, token = shown[0]
    sentence = f"the reward of {len(shown)} completions comes after their last token, on padding"
    return Fault(sentence, use.update.step, location(use, token))


def rewards_are_cut(record: AuditRecord) -> Fault | None:
    """More than a tenth of the trained rewards lie at the bounds to which the settings clip them. Or,
    without such bounds, rewards are the weighted sums of their functions, except for more than a tenth, and
    at least four, which equal the highest or the lowest reward although their sums are beyond it.
    """
    bounds = record.setting("reward_bounds")
    if not isinstance(bounds, list) or len(bounds) != 2:
        return _sums_are_cut(record)
    low, high = map(float, bounds)
    scored = [(use, use.row.token_scores) for use in record.uses if use.row.token_scores]
    sums = [(use, sum(score or 0.0 for score in scores)) for use, scores in scored]
    clipped = [use for use, score in sums if not low + MIN_SCORE < score < high - MIN_SCORE]
    if len(clipped) < MIN_COMPLETIONS or len(clipped) <= 0.1 * len(sums):
        return None
    name = record.own_name("reward_bounds")
    sentence = f"{len(clipped)} of {len(sums)} rewards, minus their baseline, are clipped to {name}"
    return Fault(f"{sentence}, {low:g} to {high:g}", clipped[0].update.step, location(clipped[0]))


def _sums_are_cut(record: AuditRecord) -> Fault | None:
    sums = [(step, n, s.reward, sum_of(record, s.rewards)) for step, n, s in record.samples if s.rewards]
    both = [(step, n, paid, due) for step, n, paid, due in sums if paid is not None and not math.isnan(due)]
    most = max((paid for _, _, paid, _ in both), default=0.0)
    least = min((paid for _, _, paid, _ in both), default=0.0)
    beyond = [one for one in both if not least - MIN_SCORE <= one[3] <= most + MIN_SCORE]
    follow = all(
        math.isclose(paid, min(max(due, least), most), abs_tol=MIN_SCORE) for _, _, paid, due in both
    )
    if not follow or len(beyond) < MIN_COMPLETIONS or len(beyond) <= 0.1 * len(both):
        return None
    step, n, paid, due = beyond[0]
    sentence = f"{len(beyond)} of {len(both)} rewards are clipped to {least:g} to {most:g}"
    return Fault(f"{sentence}: {paid:g} for a sum of {due:g}", step, {"completion": n})


def prompt_is_in_the_mask(record: AuditRecord) -> Fault | None:
    """The mask of the loss is 1 at tokens of the prompt."""
    shown = [use for use in record.uses if use.row.prompt_trained]
    if not shown:
        return None
    use = shown[0]
    sentence = f"{use.row.prompt_trained} tokens of the prompt are in the loss"
    sentence += f", and {len(shown)} completions have such tokens"
    return Fault(sentence, use.update.step, location(use))


# --- the KL -----------------------------------------------------------------------------------------


def _charged(record: AuditRecord) -> Iterator[tuple[Use, Tensor, Tensor]]:
    """Yield each completion with the KL that was charged and its log-ratio to the reference, (T,) each."""
    coef = record.number("algorithm.kl_ctrl.kl_coef", 0.0)
    fixed = record.setting("algorithm.kl_ctrl.type", "fixed") == "fixed"
    # verl records the difference of two rewards, and sets the coefficient even without a KL in the reward.
    derived = record.setting("algorithm.use_kl_in_reward") is True and fixed and coef > 0
    for use in record.uses:
        row = use.row
        kl = row.kl
        if kl is None and derived and row.token_scores and row.token_rewards:
            pairs = zip(row.token_scores, row.token_rewards, strict=False)
            kl = [None if a is None or b is None else (a - b) / coef for a, b in pairs]
        # A KL in the reward is that of the old policy; a KL in the loss is that of the present one.
        present = row.old_logprobs if derived or row.token_rewards else row.logprobs or row.old_logprobs
        values = (kl or (), present or (), row.ref_logprobs or (), row.mask or ())
        rows = [v for v in zip(*values, strict=False) if v[3] and None not in v]
        if rows:
            charged, policy, reference, _ = torch.tensor(rows, dtype=torch.float64).T
            yield use, charged, policy - reference


def _fits(charged: Tensor, due: Tensor) -> bool:
    close = 1e-3 + 0.02 * float(due.abs().max())
    return any(bool((charged - kl).abs().max() <= close) for kl in (due.clamp(-BOUND, BOUND), due))


def _estimator(record: AuditRecord) -> Callable[[Tensor], Tensor] | None:
    """Return the estimator of a run's KL; for a trainer of no known framework that does not name one, the
    estimator that reproduces all charged values.
    """
    named = record.setting("kl_estimator")
    if named is not None or record.header.framework in FRAMEWORKS:
        return ESTIMATORS.get(str(named or "k1"))
    charged = list(_charged(record))
    fitting = (e for e in ESTIMATORS.values() if all(_fits(kl, e(d)) for _, kl, d in charged))
    return next(fitting, penalties.k1)


def kl_is_another(record: AuditRecord) -> Fault | None:
    """The charged KL, computed again from the log-probs of the policy and the reference, is not what the
    settings' estimator gives: its arguments are exchanged, or it comes from another estimator. Or the loss
    is the expected one with the arguments of its KL exchanged.
    """
    in_the_loss = kl_has_its_arguments_exchanged(record) or kl_of_the_loss_is_exchanged(record)
    if in_the_loss is not None:
        return in_the_loss
    estimator = _estimator(record)
    if estimator is None:
        return None
    off = [(use, kl, d) for use, kl, d in _charged(record) if not _fits(kl, estimator(d))]
    if len(off) < MIN_COMPLETIONS:
        return None
    sentence = "the KL is not what its estimator gives"
    if all(_fits(kl, estimator(-d)) for _, kl, d in off):
        sentence = "the KL has its arguments exchanged: it goes from the reference to the policy"
    for name, alternative in ESTIMATORS.items():
        if alternative is not estimator and all(_fits(kl, alternative(d)) for _, kl, d in off):
            sentence = f"the KL is {name}, which the settings do not ask for"
    use, kl, d = max(off, key=lambda o: float((o[1] - estimator(o[2])).abs().max()))
    token = int((kl - estimator(d)).abs().argmax())
    numbers = f"{float(kl[token]):.4g} where {float(estimator(d)[token]):.4g} is expected"
    return Fault(f"{sentence}: {numbers}", use.update.step, location(use))


def kl_drowns_the_reward(record: AuditRecord) -> Fault | None:
    """In at least half of the updates, and in at least two, the KL in the rewards of completions varies ten
    times as much as the scores of the whole run.
    """
    updates = [update for update in record.updates if any(row.token_rewards for row in update.rows)]
    scores = [_total(row.token_scores) for update in updates for row in update.rows]
    spread = pvariance(scores) if scores else 0.0
    charges = [
        (
            update.step,
            pvariance([_total(row.token_scores) - _total(row.token_rewards) for row in update.rows]),
        )
        for update in updates
    ]
    drowned = [(step, variance) for step, variance in charges if variance > DROWNING_FACTOR * spread > 0]
    if len(drowned) < 2 or len(drowned) < 0.5 * len(updates):
        return None
    step, variance = drowned[-1]
    sentence = "the KL in the reward differs between completions"
    times = math.sqrt(variance / spread)
    return Fault(f"{sentence} {times:.2g} times as much as their scores: it decides what is trained", step)


def _total(values: Numbers | None) -> float:
    return sum(value or 0.0 for value in values or ())


# --- returns ----------------------------------------------------------------------------------------


def returns_of(rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float) -> Tensor:
    """Return GAE's returns, (T,); without a critic, V = 0 and lam = 1, discounted sums of the rewards."""
    row = torch.tensor([rewards, values], dtype=torch.float64)
    everywhere = torch.ones(1, len(rewards), dtype=torch.bool)
    return value_targets(row[:1], row[1:], everywhere, gamma=gamma, lam=lam)[0]


class Discounts(NamedTuple):
    """The two settings of GAE."""

    gamma: float
    lam: float


class CompletionReturns(NamedTuple):
    """The returns of a completion, with what they are summed from, (T,) each."""

    use: Use
    rewards: list[float]
    values: list[float]
    returns: Tensor

    def due(self, by: Discounts) -> Tensor:
        """Return the returns under these settings."""
        return returns_of(self.rewards, self.values, by.gamma, by.lam)

    def follows(self, by: Discounts) -> bool:
        """Whether the recorded returns follow from these settings."""
        return torch.allclose(self.due(by), self.returns, 1e-2, 1e-3)

    def follows_to_the_last(self, by: Discounts) -> bool:
        """Whether all returns follow from the last one under these settings, whatever the last one is."""
        *rewards, _ = self.rewards
        *values, last = self.values
        # The last advantage is treated as a reward after the end, so that the last return fits by definition.
        rewards[-1:] = [r + by.gamma * last + by.gamma * by.lam * self._last_advantage for r in rewards[-1:]]
        due = returns_of(rewards, values, by.gamma, by.lam)
        return torch.allclose(due, self.returns[:-1], 1e-2, 1e-3)

    @property
    def _last_advantage(self) -> float:
        return float(self.returns[-1]) - self.values[-1]


def _summed(record: AuditRecord) -> Iterator[CompletionReturns]:
    """Yield the returns of completions whose trained tokens are contiguous."""
    for use in record.uses:
        row = use.row
        mask = row.mask or []
        size = sum(mask)
        if size and all(mask[:size]) and row.returns and row.token_rewards is not None:
            rewards = _first(row.token_rewards, size)
            returns = torch.tensor(_first(row.returns, size), dtype=torch.float64)
            yield CompletionReturns(use, rewards, _first(row.values or [], size), returns)


def _first(values: Numbers, size: int) -> list[float]:
    """Return the first ``size`` values, with 0 for missing ones."""
    numbers = [value or 0.0 for value in values[:size]]
    return numbers + [0.0] * (size - len(numbers))


def returns_are_others(record: AuditRecord) -> Fault | MissingField | None:
    """The returns are not the sums of the completion's rewards that the settings' gamma and lambda give, with
    the critic's values if there is a critic.
    """
    own_loop = record.header.framework not in FRAMEWORKS
    if own_loop and (record.setting("gamma") is None or record.setting("lam") is None):
        return MissingField("settings.gamma")
    if not own_loop and record.setting("estimator") not in SUMS.get(record.header.framework, ()):
        return None
    gamma = record.number("gamma", 1.0)
    lam = record.number("lam", 1.0)
    sums = list(_summed(record))
    critic = any(summed.use.row.values for summed in sums)
    discounts = Discounts(gamma, lam if critic else 1.0)
    wrong = [summed for summed in sums if not summed.follows(discounts)]
    if len(wrong) < MIN_COMPLETIONS:
        return None
    # The settings may have been exchanged, or one of them left out.
    candidates = (Discounts(*pair) for pair in product((lam, gamma, 1.0), (gamma, lam, 1.0)))
    alternatives = (other for other in candidates if other != discounts)
    sentence = f"returns do not follow from gamma {discounts.gamma:g} and lambda {discounts.lam:g}"
    match = next((other for other in alternatives if all(s.follows(other) for s in sums)), None)
    if match is not None:
        sentence += f" but from gamma {match.gamma:g} and lambda {match.lam:g}"
    elif all(summed.follows_to_the_last(discounts) for summed in wrong):
        sentence = "returns include values after the end of their completion: they continue into the next row"
    return _returns_fault(sentence, wrong[0], discounts)


def _returns_fault(sentence: str, wrong: CompletionReturns, discounts: Discounts) -> Fault:
    """Return the fault of a completion's returns, with the token that deviates most."""
    expected = wrong.due(discounts)
    token = int((expected - wrong.returns).abs().argmax())
    numbers = f"{float(wrong.returns[token]):.4g} where {float(expected[token]):.4g} is expected"
    return Fault(f"{sentence}: {numbers}", wrong.use.update.step, location(wrong.use, token))


CHECKS = {
    "prompt_in_loss": prompt_is_in_the_mask,
    "reward_cut": rewards_are_cut,
    "reward_on_padding": rewards_are_on_padding,
    "kl_differs": kl_is_another,
    "kl_drowns": kl_drowns_the_reward,
    "returns_differ": returns_are_others,
}
