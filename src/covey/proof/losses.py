"""A second implementation of the loss of one completion, axis by axis: (T,) in, (T,) out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from covey.proof.formulas import AxisSettings, ShadowRow

FAR = 20.0
"""Bound on log-ratios; the documentation of the ratios names it."""


def value_loss_of_row(values: Tensor, row: ShadowRow, clip: float | None) -> Tensor:
    """(V - R)^2 / 2, or the same for V clipped around its old value, whichever is larger. (T,)."""
    near = values if clip is None else row.values + (values - row.values).clamp(-clip, clip)
    return torch.maximum((values - row.targets) ** 2, (near - row.targets) ** 2) / 2


def ratio(name: str, logprobs: Tensor, row: ShadowRow, s: AxisSettings) -> Tensor:
    """Return pi / pi_old, at the level of the axis."""
    moved = (logprobs - row.old).clamp(-FAR, FAR)
    if name == "on_policy":
        return (logprobs - logprobs.detach()).exp()
    if name == "token":
        return moved.exp()
    if name == "completion":
        return moved.sum().clamp(-FAR, FAR).exp().expand_as(moved)
    if name == "geometric_clipped":
        bound = s["clip_log"]
        moved = torch.where(row.advantage > 0, moved.clamp(max=bound), moved.clamp(min=-bound))
        return moved.mean().exp().expand_as(moved)
    mean_ratio = moved.mean().exp().expand_as(moved)
    if name == "sequence":
        return mean_ratio
    if name == "sequence_token":
        # The value is the sequence ratio; each token's gradient comes from its own log-prob.
        return mean_ratio.detach() * logprobs.exp() / logprobs.detach().exp()
    raise KeyError(name)


def surrogate(name: str, rho: Tensor, logprobs: Tensor, row: ShadowRow, s: AxisSettings) -> Tensor:
    """Return the loss of each token before weights. Detached factors are weights on log pi."""
    advantage = row.advantage
    moved = (logprobs - row.old).clamp(-FAR, FAR)
    match name:
        case "unclipped":
            return -rho * advantage
        case "clip":
            return _clip(rho, advantage, s)
        case "cispo":
            return -rho.detach().clamp(s["floor"], s["cap"]) * advantage * logprobs
        case "sapo":
            return _sapo(rho, advantage, s)
        case "vespo":
            return -_vespo_weight(rho.detach(), advantage, s) * advantage * logprobs
        case "dro":
            return s["beta"] / 2 * moved**2 - advantage * logprobs
        case "group_classification":
            return _group_classification(logprobs, row, s["tau"])
        case "kl_on_selected":
            return -rho * advantage + s["coef"] * moved.abs() * row.selected
        case _:
            return _divergence_mask(name, logprobs, row, s)


def _clip(rho: Tensor, advantage: Tensor, s: AxisSettings) -> Tensor:
    """-min(rho A, clip(rho) A), for a negative advantage at most -c A with a dual clip c. PPO."""
    gain = torch.minimum(rho * advantage, rho.clamp(1 - s["clip_low"], 1 + s["clip_high"]) * advantage)
    if s["dual_clip"] is not None:
        gain = torch.where(advantage < 0, torch.maximum(gain, s["dual_clip"] * advantage), gain)
    return -gain


def _sapo(rho: Tensor, advantage: Tensor, s: AxisSettings) -> Tensor:
    """-4 / tau sigmoid(tau (rho - 1)) A, with a tau for each sign of A. SAPO."""
    tau = torch.where(advantage > 0, s["tau_up"], s["tau_down"]).double()
    return -4 / tau * torch.sigmoid(tau * (rho - 1)) * advantage


def _vespo_weight(rho: Tensor, advantage: Tensor, s: AxisSettings) -> Tensor:
    """rho^k e^(lambda (1 - rho)), with k and lambda for each sign of A. VESPO."""
    k = torch.where(advantage >= 0, s["k_up"], s["k_down"]).double()
    lam = torch.where(advantage >= 0, s["lam_up"], s["lam_down"]).double()
    return rho**k * (lam * (1 - rho)).exp()


def _divergence_mask(name: str, logprobs: Tensor, row: ShadowRow, s: AxisSettings) -> Tensor:
    """DPPO: no loss for a token whose probability has moved too far in the direction of its advantage."""
    present = logprobs.detach().exp()
    before = row.old.exp()
    weight = (present / before).clamp(max=s["cap"])
    if name == "divergence_mask_tv":
        outward = (present - before) * row.advantage.sign() > s["threshold"]
    elif name == "divergence_mask_kl":
        p = before.clamp(max=1 - 1e-6)
        q = present.clamp(max=1 - 1e-6)
        distance = p * (before / present).log() + (1 - p) * ((1 - p) / (1 - q)).log()
        outward = ((q - p) * row.advantage > 0) & (distance > s["threshold"])
    else:
        raise KeyError(name)
    return -torch.where(outward, 0.0, weight) * row.advantage * logprobs


def _group_classification(logprobs: Tensor, row: ShadowRow, tau: float) -> Tensor:
    """log(1 + sum of e^(-+ mean log-ratio / tau)) of each class of the group, the others held fixed. REAL."""
    score = (logprobs - row.old).clamp(-FAR, FAR).mean()
    sign = float(row.advantage.sum().sign())
    loss = torch.zeros((), dtype=torch.float64)
    for side in (1.0, -1.0):
        others = math.fsum(math.exp(-side * m / tau) for x, m in row.siblings if x == side)
        term = (-side * score / tau).exp() if sign == side else torch.zeros(())
        loss = loss + (1 + others + term).log()
    return loss.expand_as(logprobs)


def divergence(name: str, d: Tensor) -> Tensor:
    """Return an estimate of KL(pi || ref) from d = log pi - log ref."""
    bounded = d.clamp(min=-FAR)
    table = {"k1": d, "k2": d**2 / 2, "k3": (-bounded).exp() - 1 + bounded, "absolute": d.abs()}
    return table[name]


def correction(name: str, logprobs: Tensor, row: ShadowRow, s: AxisSettings) -> Tensor:
    """Return the importance correction for the mismatch of sampler and trainer. Detached."""
    gap = (row.old - row.sampled).clamp(-FAR, FAR)
    level = gap.sum().expand_as(gap).clamp(-FAR, FAR) if s.get("level") == "sequence" else gap
    if name == "truncated":
        return level.exp().clamp(max=s["cap"])
    if name == "masked":
        return torch.where((level.exp() >= s["low"]) & (level.exp() <= s["high"]), level.exp(), 0.0)
    if name == "decoupled":
        return gap.exp()
    if name == "geometric_mask":
        inside = s["low"] <= float(gap.mean().exp()) <= s["high"]
        return torch.full_like(gap, float(inside))
    if name == "off_policy_mask":
        moved = (logprobs.detach() - row.old).clamp(-FAR, FAR)
        drop = float(-(gap + moved).mean()) > s["delta"] and float(row.advantage.sum()) < 0
        return torch.full_like(gap, float(not drop))
    raise KeyError(name)


def multiplier(name: str, logprobs: Tensor, row: ShadowRow, s: AxisSettings) -> Tensor:
    """Return factors on the policy term of each token. Detached."""
    if name == "selected_only":
        return row.selected.double()
    if name == "unselected_only":
        return 1 - row.selected.double()
    if name == "unlikely_only":
        return (row.old.exp() < s["below"]).double()
    if name == "future_influence":
        return _future_influence((logprobs.detach() - row.old).clamp(-FAR, FAR), row, s)
    raise KeyError(name)


def _future_influence(moved: Tensor, row: ShadowRow, s: AxisSettings) -> Tensor:
    """Return e to a decayed sum of the log-ratios of each token and of later ones, within bounds."""
    decay = 0.5 ** (1 / s["half_life"])
    running = 0.0
    later = row.positions[-1]
    influence = torch.zeros_like(moved)
    for t in reversed(range(len(moved))):
        log_ratio = float(moved[t])
        # Inserted tokens count in the distance; outliers are left out of the sum.
        distance = later - row.positions[t]
        later = row.positions[t]
        counted = log_ratio if math.exp(log_ratio) <= s["outlier"] else 0.0
        running = decay**distance * running + counted
        factor = min(max(math.exp(running), s["low"]), s["high"])
        risky = float(row.advantage[t]) < 0 and math.exp(log_ratio) > s["safety"]
        influence[t] = min(factor, 1.0) if risky else factor
    return influence


def selected_tokens(name: str, rows: Sequence[ShadowRow], s: AxisSettings) -> list[Tensor]:
    """Return which tokens of an optimizer step are selected, from values at its beginning."""
    if name == "top_entropy":
        return _largest([row.old_entropy for row in rows], None, s["fraction"])
    logprobs, advantage = (torch.cat([getattr(row, x) for row in rows]) for x in ("old", "advantage"))
    every = [(row.advantage - advantage.mean()) * (row.old - logprobs.mean()) for row in rows]
    if name == "top_covariance":
        return _largest(every, None, s["fraction"])
    if name == "random_covariant":
        band = [(c >= s["low"]) & (c <= s["high"]) for c in every]
        return _largest([row.noise for row in rows], band, s["fraction"])
    raise KeyError(name)


def _largest(values: Sequence[Tensor], among: Sequence[Tensor] | None, fraction: float) -> list[Tensor]:
    """Mark the tokens with the largest values, ``fraction`` of all: at least one, and all ties.

    Siblings have the same entropy at their first token, but float64 may differ in the sixteenth digit.
    """
    among = among or [torch.ones_like(v, dtype=torch.bool) for v in values]
    candidates = sorted(torch.cat([v[a] for v, a in zip(values, among, strict=True)]).tolist(), reverse=True)
    count = min(max(round(fraction * sum(map(len, values))), int(fraction > 0)), len(candidates))
    if count == 0:
        return [torch.zeros_like(a) for a in among]
    return [a & (v >= candidates[count - 1] - 1e-9) for v, a in zip(values, among, strict=True)]


def token_weight(
    name: str, row: ShadowRow, step: Sequence[ShadowRow], max_tokens: int, s: AxisSettings
) -> float:
    """Return the weight of one token of this completion in the loss of the optimizer step."""
    trained = [r for r in step if r.trained]
    count = len(step) if s.get("rows") == "all" else len(trained)
    if name == "token_mean":
        return 1 / (sum(len(r.positions) for r in trained) + s["eps"])
    if name == "sequence_mean":
        return 1 / (count * (len(row.positions) + s["eps"]))
    if name == "sequence_sum":
        return 1 / count
    if name == "constant_length":
        return 1 / (count * (s["length"] or max_tokens))
    if name == "token_sum":
        return 1.0
    if name == "prompt_mean":
        siblings = sum(len(r.positions) for r in trained if r.group == row.group)
        return 1 / (len({r.group for r in trained}) * siblings)
    raise KeyError(name)


@dataclass(frozen=True)
class AnswerLogprob:
    """A given answer, with its log-probs."""

    total: Tensor
    """Log-prob of all its trained tokens under the policy; a scalar."""
    reference: float
    """That log-prob under the model at the start of the run."""
    length: int
    """Number of trained tokens."""

    @property
    def gain(self) -> Tensor:
        """log pi(y) - log ref(y)."""
        return self.total - self.reference

    @property
    def mean(self) -> Tensor:
        """log pi(y) / |y|."""
        return self.total / self.length


def _logistic(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def _softplus(x: Tensor) -> Tensor:
    return (1 + x.exp()).log()


def _cross_entropy(name: str, d: Tensor, wrong: float) -> Tensor:
    """Return the loss of labels of which a fraction is wrong, at the margin ``d``."""
    as_labelled = _softplus(-d)
    reversed_ = _softplus(d)
    if name == "dpo":
        return (1 - wrong) * as_labelled + wrong * reversed_
    return ((1 - wrong) * as_labelled - wrong * reversed_) / (1 - 2 * wrong)


def _of_margin(name: str, d: Tensor, s: AxisSettings) -> Tensor:
    """Return a loss of beta times the difference of both log-ratios."""
    if name in ("dpo", "robust_dpo"):
        return _cross_entropy(name, d, s["label_smoothing"])
    if name == "hinge":
        return torch.relu(1 - d)
    up = _logistic(d)
    if name == "exo":
        wrong = s["label_smoothing"]
        return up * (up / (1 - wrong)).log() + (1 - up) * ((1 - up) / wrong).log()
    mixed = _logistic(d / s["tau"])  # discopop
    return mixed * (-d).exp() - (1 - mixed) * up.log()


def _of_each(name: str, b: float, x: Tensor, y: Tensor) -> Tensor:
    """Return a loss of beta and both log-ratios, each by itself."""
    if name == "nca":
        return -_logistic(b * x).log() - (_logistic(-b * x).log() + _logistic(-b * y).log()) / 2
    if name == "bco":
        return -(_logistic(b * x) * _logistic(-b * y)).log()
    if name == "sppo":
        return (x - 0.5 / b) ** 2 + (y + 0.5 / b) ** 2
    if name == "apo_zero":
        return _logistic(-b * x) + _logistic(b * y)
    return _logistic(b * x) + _logistic(b * (y - x))  # apo_down


def _slope(r: Tensor, s: AxisSettings) -> Tensor:
    """Return the derivative of DPO's divergence at the ratio of an answer."""
    if s["divergence"] == "forward_kl":
        return 1 - 1 / r
    if s["divergence"] == "jensen_shannon":
        return (2 * r / (1 + r)).log()
    if s["divergence"] == "alpha":
        return (1 - r ** (s["alpha"] - 1)) / (1 - s["alpha"])
    return r.log()


def _of_lengths(name: str, good: AnswerLogprob, bad: AnswerLogprob, s: AxisSettings) -> Tensor:
    """Return a loss that counts the tokens of both answers."""
    if name == "ln_dpo":
        return _softplus(s["beta"] * (bad.gain / bad.length - good.gain / good.length))
    if name == "ipo":
        lengths = (good.length, bad.length) if s["level"] == "averaged" else (1, 1)
        return (good.gain / lengths[0] - bad.gain / lengths[1] - 1 / (2 * s["tau"])) ** 2
    if name == "simpo":
        return _softplus(s["gamma"] - s["beta"] * (good.mean - bad.mean))
    odds = [answer.mean.exp() / (1 - answer.mean.exp()) for answer in (good, bad)]
    return s["lam"] * (1 + odds[1] / odds[0]).log()  # orpo: -log sig(log x) = log(1 + 1 / x)


OF_MARGIN = ("dpo", "robust_dpo", "hinge", "exo", "discopop")
OF_EACH = ("nca", "bco", "sppo", "apo_zero", "apo_down")
OF_LENGTHS = ("ln_dpo", "ipo", "simpo", "orpo")


def pair_loss(name: str, good: AnswerLogprob, bad: AnswerLogprob, s: AxisSettings) -> Tensor:
    """Return the loss of a pair of answers, without ORPO's or MPO's imitation of the chosen one."""
    if name in OF_LENGTHS:
        return _of_lengths(name, good, bad, s)
    if name in OF_EACH:
        return _of_each(name, s["beta"], good.gain, bad.gain)
    margin = good.gain - bad.gain
    if name == "mpo":
        preference = _cross_entropy("dpo", s["beta"] * margin, 0.0)
        quality = _of_each("bco", s["beta"], good.gain, bad.gain)
        return s["preference_weight"] * preference + s["quality_weight"] * quality
    if name not in OF_MARGIN:
        raise KeyError(name)
    if name == "dpo":
        margin = _slope(good.gain.exp(), s) - _slope(bad.gain.exp(), s)
    return _of_margin(name, s["beta"] * margin, s)


def judged_loss(name: str, answer: AnswerLogprob, good: bool, point: float, s: AxisSettings) -> Tensor:
    """Return the loss of an answer that was judged alone, against the KL estimate ``point``."""
    if name not in ("kto", "apo_zero_unpaired"):
        raise KeyError(name)
    side = 1 if good else -1
    far = side * s["beta"] * (answer.gain - max(point, 0.0))
    return s["desirable_weight" if good else "undesirable_weight"] / (1 + far.exp())
