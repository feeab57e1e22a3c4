"""What a run's metrics mean, in words, and which setting to change: one rule a pathology.

A rule reads the metrics over the first and the last fifth of the steps, says what it has seen, or
nothing. Thresholds are starting points for reasoning tasks with 0/1 rewards; docs/metrics.md has them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from covey.config.load import Loaded
from covey.estimates import Evaluation
from covey.insight.verdict import change, course
from covey.learned import LEARNED
from covey.objective.bound import Bound

Records = Sequence[Mapping[str, Any]]
NARROW: tuple[tuple[str, float], ...] = (("rollout.temperature", 0.7), ("rollout.top_p", 0.5))
"""Sampling settings, and below what they leave too little to choose."""
FEW = 4
"""rollout.top_k up to this does too."""
CHANCE = 0.6
"""Below this a reward ranks correct and incorrect answers hardly better than a coin."""
KINDS = ("correct", "incorrect", "unscored")
"""Why a group is dead: all of it is."""


@dataclass(frozen=True)
class Remark:
    """One thing that stands out."""

    finding: str
    remedy: str
    """Empty where the config has all of it already."""

    def __str__(self) -> str:
        return f"{self.finding}. Try: {self.remedy}" if self.remedy else self.finding


class Try:
    """Something to change, except where the config has it already: where all ``unless`` hold.

    Each is (setting, comparison, value) with a comparison of ``operator``.
    """

    def __init__(self, what: str, *unless: tuple[str, Callable[..., object], object]) -> None:
        self.what, self.unless = what, unless

    def applies(self, setting: Setting) -> bool:
        """Whether the config lacks it; what is not known is taken to be lacking."""
        known = [(setting(key), holds, value) for key, holds, value in self.unless]
        return not known or any(own is UNKNOWN or not holds(own, value) for own, holds, value in known)


Setting = Callable[[str], Any]
"""A setting's name -> its value in the run, or UNKNOWN."""
UNKNOWN = object()


def unknown(_: str) -> object:
    """Where nothing is known of the config."""
    return UNKNOWN


def settings_of(loaded: Loaded) -> Setting:
    """The resolved settings of a run: those of the algorithm by axis, a function as its name."""

    def setting(name: str) -> object:
        if name == "rewards":
            return [next(iter(r)) if isinstance(r, Mapping) else r for r in loaded.config.rewards]
        if name == "stages":  # the methods of those before this one, as their folders say
            folder = loaded.config.output
            return [p.name.partition("-")[2] for p in folder.parent.glob("[0-9]*-*") if p != folder]
        section, *path = name.split(".")
        value: Any = loaded.algorithm if section == "algorithm" else getattr(loaded.config, section, UNKNOWN)
        for part in path:
            inside = value.all_settings.get(part, UNKNOWN) if isinstance(value, Bound) else UNKNOWN
            value = getattr(value, part, inside)
        return value.name if isinstance(value, Bound) else value

    return setting


class Seen:
    """Means of metrics early and late in a run; NaN where there are none, so that no rule holds."""

    def __init__(self, metrics: Records, evals: Records = (), setting: Setting = unknown) -> None:
        fifth = max(1, len(metrics) // 5)
        self.first, self.last, self.setting = metrics[:fifth], metrics[-fifth:], setting
        self.evals = [Evaluation.from_record(record) for record in evals]

    def early(self, name: str) -> float:
        """Mean over the first steps."""
        return _mean(self.first, name)

    def late(self, name: str) -> float:
        """Mean over the last steps."""
        return _mean(self.last, name)

    def rise(self, name: str) -> float:
        """Late minus early."""
        return self.late(name) - self.early(name)

    def fraction_above(self, name: str, limit: float, says: str) -> str | None:
        """The evidence that a fraction is too large in the end."""
        return f"{100 * self.late(name):.0f} % {says}" if self.late(name) > limit else None

    def value_above(self, name: str, limit: float, says: str) -> str | None:
        """The evidence that a value is too large in the end."""
        return f"{says} ({name} {self.late(name):.2g})" if self.late(name) > limit else None

    def held_out_gain(self) -> float:
        """Of sampled accuracy on held-out problems, from the first to the last evaluation."""
        if len(self.evals) < 2:
            return math.nan
        return float(self.evals[-1].pass_rate.mean() - self.evals[0].pass_rate.mean())

    def fell(self) -> bool:
        """Whether the policy got worse: on held-out problems, or without these in training."""
        if len(self.evals) > 1:
            return change(self.evals[0], self.evals[-1]) == "got worse"
        return self.rise("accuracy") < -0.1 and self.setting("rollout.curriculum") != "frontier"


def _mean(records: Records, name: str) -> float:
    values = [r[name] for r in records if r.get(name) is not None]
    return sum(values) / len(values) if values else math.nan


@dataclass(frozen=True)
class Rule:
    """A likely cause of not learning: its evidence in a run, if there is any, and what to change."""

    evidence: Callable[[Seen], str | None]
    remedies: tuple[Try, ...]


RULES: list[Rule] = []
"""In the order of this file: the likeliest causes of not learning first."""


def rule(*remedies: Try) -> Callable[[Callable[[Seen], str | None]], Callable[[Seen], str | None]]:
    """Make a rule of a function that returns its evidence, or None where its threshold is not met."""

    def register(evidence: Callable[[Seen], str | None]) -> Callable[[Seen], str | None]:
        RULES.append(Rule(evidence, remedies))
        return evidence

    return register


HAS_KL = ("algorithm.kl", operator.is_not, None)
ONE_UPDATE = ("train.updates_per_batch", operator.eq, 1)
PULL = Try("algorithm.kl, a pull to where it began", HAS_KL)
SMALLER_STEPS = (
    Try("a smaller train.lr"),
    Try(
        "fewer train.updates_per_batch and train.inner_epochs",
        ONE_UPDATE,
        ("train.inner_epochs", operator.eq, 1),
    ),
)


@rule(Try("`covey score` on some of them: what do the reward functions say?"))
def _unscored(seen: Seen) -> str | None:
    return seen.fraction_above("reward/unscored", 0.05, "of the completions could not be scored")


@rule(
    Try("rollout.temperature 1", ("rollout.temperature", operator.ge, 1)),
    Try("rollout.top_p 1", ("rollout.top_p", operator.ge, 1)),
    Try("rollout.top_k 0", ("rollout.top_k", operator.eq, 0)),
)
def _narrow(seen: Seen) -> str | None:
    """Groups that tie because the sampling settings leave nothing to choose."""
    copies, dead, setting = seen.late("text/duplicates"), seen.late("groups/dead"), seen.setting
    known = [(key, setting(key), bound) for key, bound in NARROW if setting(key) is not UNKNOWN]
    causes = [f"{key} {value:g}" for key, value, bound in known if value < bound]
    if (top_k := setting("rollout.top_k")) is not UNKNOWN and 0 < top_k <= FEW:
        causes.append(f"rollout.top_k {top_k}")
    if not (causes and copies > 0.5 and dead > 0.5 and seen.late("accuracy") < 0.95):
        return None
    return (
        f"{100 * dead:.0f} % of the groups tie and {100 * copies:.0f} % of the completions are copies of "
        f"another: {' and '.join(causes)} {'leave' if len(causes) > 1 else 'leaves'} little to choose"
    )


@rule(*SMALLER_STEPS, PULL)
def _worse(seen: Seen) -> str | None:
    if not seen.fell() or _farming(seen):
        return None
    if len(seen.evals) > 1:
        found = f"the run made the policy worse: {course(seen.evals[0], seen.evals[-1])}"
    else:
        now, before = 100 * seen.late("accuracy"), 100 * seen.early("accuracy")
        found = f"the run made the policy worse: from {before:.0f} % correct in training to {now:.0f} %"
    own = seen.setting("algorithm.advantage.own") is True
    return f"{found}, with your own estimator {seen.setting('algorithm.advantage')}" if own else found


@rule(
    Try("a cold start (a stage with method: sft)", ("stages", operator.contains, "sft")),
    Try("easier problems"),
    Try("a larger rollout.group_size"),
)
def _too_hard(seen: Seen) -> str | None:
    """Problems that are too hard, where nothing else explains it."""
    if seen.late("length/truncated") > 0.5 or seen.fell() or _narrow(seen):
        return None
    says = "of the groups tie because every answer is incorrect"
    return seen.fraction_above("groups/dead_incorrect", 0.5, says)


@rule(
    Try("harder problems, these are solved"),
    Try("algorithm.filter: informative", ("algorithm.filter", operator.is_not, None)),
    Try("rollout.curriculum: frontier", ("rollout.curriculum", operator.eq, "frontier")),
)
def _too_easy(seen: Seen) -> str | None:
    says = "of the groups tie because every answer is correct"
    return None if _narrow(seen) else seen.fraction_above("groups/dead_correct", 0.5, says)


@rule(Try("weights in rewards that pay a correct answer more than an incorrect one"))
def _tied(seen: Seen) -> str | None:
    fraction = seen.late("groups/dead") - sum(seen.late(f"groups/dead_{kind}") for kind in KINDS)
    says = "of the groups tie though only some answers are correct"
    return f"{100 * fraction:.0f} % {says}" if fraction > 0.5 else None


@rule(
    Try("a larger rollout.max_tokens"),
    Try("the reward soft_overlong", ("rewards", operator.contains, "soft_overlong")),
)
def _truncated(seen: Seen) -> str | None:
    return seen.fraction_above(
        "length/truncated", 0.1, "of the completions were truncated at rollout.max_tokens"
    )


@rule(
    Try("a smaller train.lr"),
    Try("algorithm.surrogate.clip_high 0.28", ("algorithm.surrogate.clip_high", operator.ge, 0.28)),
)
def _collapse(seen: Seen) -> str | None:
    entropy, unsolved = seen.late("entropy/sampled"), seen.late("accuracy") < 0.9
    fell = entropy < 0.05 and seen.early("entropy/sampled") > 2 * entropy
    return f"entropy fell to {entropy:.3f} nats: exploration has ended" if fell and unsolved else None


@rule(
    Try("a reward model refreshed on this run's completions (`covey pairs`, method: reward_model)"),
    PULL,
    Try("fewer steps against the same reward model"),
)
def _overoptimised(seen: Seen) -> str | None:
    """A learned reward that rises and does not rank as the verifier does, or no longer."""
    for name in LEARNED:
        before, now = (f(f"reward/{name}/agreement") for f in (seen.early, seen.late))
        rise = seen.rise(f"reward/{name}/mean")
        if rise > 0 and (now < CHANCE or now < before - 0.1):
            what = "is over-optimised" if now < before - 0.1 else "knows little of the verdict"
            return (
                f"{name} {what}: it gives {rise:+.2g} more than at the start, and ranks a correct answer "
                f"above an incorrect one in {100 * now:.0f} % of the cases, first in {100 * before:.0f} %"
            )
    return None


@rule(Try("reading rollouts/ and `covey stress`: the reward pays for something else than the answer"))
def _farming(seen: Seen) -> str | None:
    rise, gain = seen.rise("reward/mean"), seen.held_out_gain()
    if not (rise > 0.3 * seen.early("reward/std") and gain < 0.02):
        return None
    return f"the reward rose by {rise:.2f}, held-out accuracy changed by {100 * gain:+.0f} points"


@rule(Try("other weights in rewards, or gated_by, so that the one counts only where the other is met"))
def _conflict(seen: Seen) -> str | None:
    prefix = "reward/correlation/"
    found = {n: seen.late(n) for record in seen.last for n in record if n.startswith(prefix)}
    name = min(found, key=lambda n: found[n], default="")
    if not name or not found[name] < -0.3:
        return None
    return f"rewards {' and '.join(name.removeprefix(prefix).split('/'))} pull apart (r {found[name]:.2f})"


@rule(
    Try(
        "algorithm: dr_grpo, whose loss does not divide by the length",
        ("algorithm.reduce", lambda own, names: own in names, ("constant_length", "token_mean")),
    )
)
def _length_bias(seen: Seen) -> str | None:
    correct, incorrect = seen.late("length/correct"), seen.late("length/incorrect")
    grew = incorrect > 1.3 * seen.early("length/incorrect")
    if not (grew and correct > 0 and incorrect > 1.5 * correct):
        return None
    return f"incorrect answers grew to {incorrect:.0f} tokens, correct ones have {correct:.0f}"


@rule(*SMALLER_STEPS)
def _far_within_a_batch(seen: Seen) -> str | None:
    return seen.value_above("ratio/q99", 2.0, "the policy moves far within a batch")


@rule(
    Try("larger algorithm.surrogate.clip_low and clip_high"),
    Try("fewer train.updates_per_batch", ONE_UPDATE),
)
def _clipping(seen: Seen) -> str | None:
    fraction = seen.late("clip/low") + seen.late("clip/high")
    says = "of the tokens are clipped and contribute no gradient"
    return f"{100 * fraction:.0f} % {says}" if fraction > 0.2 else None


@rule(
    Try("algorithm.correction: truncated", ("algorithm.correction", operator.is_not, None)),
    Try("dtype: float32", ("dtype", operator.eq, "float32")),
)
def _mismatch(seen: Seen) -> str | None:
    return seen.value_above("mismatch/mean", 0.02, "sampler and trainer disagree")


@rule(Try("a larger algorithm.kl.coef"), Try("a smaller train.lr"))
def _drift(seen: Seen) -> str | None:
    return seen.value_above("kl/completion_k1", 10.0, "the policy has drifted far from the reference")


@rule(Try("a smaller train.lr"), PULL)
def _repetition(seen: Seen) -> str | None:
    return seen.fraction_above("text/repetition", 0.3, "of what is written repeats itself")


@rule(Try("a train.lr three times as large"), Try("more train.steps"))
def _flat(seen: Seen) -> str | None:
    rise = abs(seen.rise("reward/mean"))
    still = rise < 0.1 * seen.early("reward/std") and seen.late("groups/dead") < 0.5
    return f"the reward has not moved ({rise:.3f}), although groups differ" if still else None


def explain(metrics: Records, evals: Records = (), setting: Setting = unknown) -> list[Remark]:
    """All that stands out in the records of `metrics.jsonl` and `evals.jsonl`."""
    seen = Seen(metrics, evals, setting)
    return [
        Remark(found, ", or ".join(t.what for t in rule.remedies if t.applies(setting)))
        for rule in RULES
        if (found := rule.evidence(seen)) is not None
    ]


def no_signal(metrics: Records, setting: Setting) -> str:
    """Why steps had no advantage at all, and what to do about it."""
    fraction = {
        kind: sum(r.get(f"groups/dead_{kind}") or 0.0 for r in metrics) / max(len(metrics), 1)
        for kind in KINDS
    }
    fraction["other"] = 1.0 - sum(fraction.values())
    likeliest = max(fraction, key=lambda kind: fraction[kind])
    remedy = {
        "correct": "The problems are too easy: take harder ones, or end here",
        "incorrect": "The problems are too hard, or the rewards miss correct answers (look at rollouts/): "
        "begin with a supervised stage, raise rollout.group_size, or raise rollout.max_tokens if many are "
        "truncated",
        "unscored": "The rewards give no scores: repair them, raise scoring.timeout, or check their columns",
        "other": "Correct and incorrect answers got the same: look at the weights of the rewards",
    }[likeliest]
    truncated = _mean(metrics, "length/truncated") > 0.5
    if likeliest == "incorrect" and truncated:
        remedy = "Most are truncated before they give an answer: raise rollout.max_tokens"
    if narrow := _narrow(Seen(metrics, (), setting)):
        remedy = f"{narrow[0].upper()}{narrow[1:]}: raise it"
    if likeliest == "other" and _mean(metrics, "groups/dead") < 0.5:
        remedy = "Rewards differ within groups, so it is algorithm.advantage that gives every answer 0"
        if setting("rollout.mask_truncated") is True and truncated:
            remedy = "rollout.mask_truncated trains no truncated completion: raise rollout.max_tokens"
    return (
        f"{fraction['correct']:.0%} of the groups were all correct, {fraction['incorrect']:.0%} all "
        f"incorrect, {fraction['unscored']:.0%} unscored. {remedy}"
    )
