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
from covey.objective.choice import Choice

Records = Sequence[Mapping[str, Any]]
NARROW: tuple[tuple[str, float], ...] = (("rollout.temperature", 0.7), ("rollout.top_p", 0.5))
"""Sampling settings, and below what they leave too little to choose."""
FEW = 4
"""rollout.top_k up to this does too."""


@dataclass(frozen=True)
class Remark:
    """One thing that stands out."""

    finding: str
    remedy: str
    """Empty where the config has all of it already."""

    def __str__(self) -> str:
        return f"{self.finding}. Try: {self.remedy}" if self.remedy else self.finding


class Try:
    """Something to change, but for configs that have it already: where all ``unless`` hold.

    Each is (setting, comparison, value) with a comparison of ``operator``.
    """

    def __init__(self, what: str, *unless: tuple[str, Callable[[Any, Any], Any], Any]) -> None:
        self.what, self.unless = what, unless

    def applies(self, setting: Setting) -> bool:
        """Whether the config lacks it; what is not known is taken to be lacking."""
        known = [(setting(key), holds, value) for key, holds, value in self.unless]
        return not known or any(own is UNKNOWN or not holds(own, value) for own, holds, value in known)


Setting = Callable[[str], Any]
"""A setting's name -> its value in the run, or UNKNOWN."""
UNKNOWN = object()


def unknown(_: str) -> Any:
    """Where nothing is known of the config."""
    return UNKNOWN


def settings_of(loaded: Loaded) -> Setting:
    """The resolved settings of a run: those of the algorithm by axis, a function as its name."""

    def setting(name: str) -> Any:
        if name == "rewards":
            return [next(iter(r)) if isinstance(r, Mapping) else r for r in loaded.config.rewards]
        if name == "stages":  # the methods of those before this one, as their folders say
            folder = loaded.config.output
            return [p.name.partition("-")[2] for p in folder.parent.glob("[0-9]*-*") if p != folder]
        section, *path = name.split(".")
        value: Any = loaded.algorithm if section == "algorithm" else getattr(loaded.config, section, UNKNOWN)
        for part in path:
            inside = value.all_settings.get(part, UNKNOWN) if isinstance(value, Choice) else UNKNOWN
            value = getattr(value, part, inside)
        return value.name if isinstance(value, Choice) else value

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


def _conflict(seen: Seen) -> str | None:
    prefix = "reward/correlation/"
    found = {n: seen.late(n) for record in seen.last for n in record if n.startswith(prefix)}
    name = min(found, key=lambda n: found[n], default="")
    if not name or not found[name] < -0.3:
        return None
    return f"rewards {' and '.join(name.removeprefix(prefix).split('/'))} pull apart (r {found[name]:.2f})"


def _share(name: str, limit: float, says: str) -> Callable[[Seen], str | None]:
    """A rule on a share that is too large in the end."""
    return lambda seen: f"{100 * seen.late(name):.0f} % {says}" if seen.late(name) > limit else None


def _above(name: str, limit: float, says: str) -> Callable[[Seen], str | None]:
    """A rule on a value that is too large in the end."""
    return lambda seen: f"{says} ({name} {seen.late(name):.2g})" if seen.late(name) > limit else None


def _collapse(seen: Seen) -> str | None:
    entropy, unsolved = seen.late("entropy/sampled"), seen.late("accuracy") < 0.9
    fell = entropy < 0.05 and seen.early("entropy/sampled") > 2 * entropy
    return f"entropy fell to {entropy:.3f} nats: exploration has ended" if fell and unsolved else None


def _farming(seen: Seen) -> str | None:
    rise, gain = seen.rise("reward/mean"), seen.held_out_gain()
    if not (rise > 0.3 * seen.early("reward/std") and gain < 0.02):
        return None
    return f"the reward rose by {rise:.2f}, held-out accuracy changed by {100 * gain:+.0f} points"


def _narrow(seen: Seen) -> str | None:
    """Groups that tie because the settings of sampling leave nothing to choose."""
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


def _worse(seen: Seen) -> str | None:
    if not seen.fell() or _farming(seen):
        return None
    if len(seen.evals) > 1:
        found = f"the run made the policy worse: {course(seen.evals[0], seen.evals[-1])}"
    else:
        now, before = 100 * seen.late("accuracy"), 100 * seen.early("accuracy")
        found = f"the run made the policy worse: from {before:.0f} % right in training to {now:.0f} %"
    own = seen.setting("algorithm.advantage.own") is True
    return f"{found}, with your own estimator {seen.setting('algorithm.advantage')}" if own else found


def _dead_wrong(seen: Seen) -> str | None:
    """Problems that are too hard, where nothing else explains it."""
    found = _share("groups/dead_wrong", 0.5, "of the groups tie because every answer is wrong")(seen)
    cut = seen.late("length/truncated") > 0.5
    return None if cut or seen.fell() or _narrow(seen) else found


def _dead_right(seen: Seen) -> str | None:
    found = _share("groups/dead_right", 0.5, "of the groups tie because every answer is right")(seen)
    return None if _narrow(seen) else found


def _tied(seen: Seen) -> str | None:
    alike = sum(seen.late(f"groups/dead_{kind}") for kind in ("right", "wrong", "unscorable"))
    share = seen.late("groups/dead") - alike
    return (
        f"{100 * share:.0f} % of the groups tie though only some answers are right" if share > 0.5 else None
    )


def _flat(seen: Seen) -> str | None:
    rise = abs(seen.rise("reward/mean"))
    still = rise < 0.1 * seen.early("reward/std") and seen.late("groups/dead") < 0.5
    return f"the reward has not moved ({rise:.3f}), although groups differ" if still else None


def _clipping(seen: Seen) -> str | None:
    share = seen.late("clip/low") + seen.late("clip/high")
    return f"{100 * share:.0f} % of the tokens are clipped and teach nothing" if share > 0.2 else None


def _length_bias(seen: Seen) -> str | None:
    right, wrong = seen.late("length/right"), seen.late("length/wrong")
    grew = right > 0 and wrong > 1.5 * right and wrong > 1.3 * seen.early("length/wrong")
    return f"wrong answers grew to {wrong:.0f} tokens, right ones have {right:.0f}" if grew else None


def _policy_moves(*more: Try) -> tuple[Try, ...]:
    """What to do about a policy that moves too far."""
    once = (("train.updates_per_batch", operator.eq, 1), ("train.inner_epochs", operator.eq, 1))
    return (
        Try("a smaller train.lr"),
        Try("fewer train.updates_per_batch and train.inner_epochs", *once),
        *more,
    )


def _among(own: object, names: Sequence[object]) -> bool:
    return own in names


HAS_KL = ("algorithm.kl", operator.is_not, None)
RULES: tuple[tuple[Callable[[Seen], str | None], tuple[Try, ...]], ...] = (
    (
        _share("reward/unscorable", 0.05, "of the completions could not be judged"),
        (Try("`covey score` on some of them: what do the reward functions say?"),),
    ),
    (
        _narrow,
        (
            Try("rollout.temperature 1", ("rollout.temperature", operator.ge, 1)),
            Try("rollout.top_p 1", ("rollout.top_p", operator.ge, 1)),
            Try("rollout.top_k 0", ("rollout.top_k", operator.eq, 0)),
        ),
    ),
    (_worse, _policy_moves(Try("algorithm.kl, a pull to where it began", HAS_KL))),
    (
        _dead_wrong,
        (
            Try("a cold start (a stage with method: sft)", ("stages", operator.contains, "sft")),
            Try("easier problems"),
            Try("a larger rollout.group_size"),
        ),
    ),
    (
        _dead_right,
        (
            Try("harder problems, these are solved"),
            Try("algorithm.filter: informative", ("algorithm.filter", operator.is_not, None)),
            Try("rollout.curriculum: frontier", ("rollout.curriculum", operator.eq, "frontier")),
        ),
    ),
    (_tied, (Try("weights in rewards that pay a right answer more than a wrong one"),)),
    (
        _share("length/truncated", 0.1, "of the completions were cut at rollout.max_tokens"),
        (
            Try("a larger rollout.max_tokens"),
            Try("the reward soft_overlong", ("rewards", operator.contains, "soft_overlong")),
        ),
    ),
    (
        _collapse,
        (
            Try("a smaller train.lr"),
            Try("algorithm.surrogate.clip_high 0.28", ("algorithm.surrogate.clip_high", operator.ge, 0.28)),
        ),
    ),
    (
        _farming,
        (Try("reading rollouts/ and `covey stress`: the reward pays for something else than the answer"),),
    ),
    (
        _conflict,
        (Try("other weights in rewards, or gated_by, so that the one counts only where the other is met"),),
    ),
    (
        _length_bias,
        (
            Try(
                "algorithm: dr_grpo, whose loss does not divide by the length",
                ("algorithm.reduce", _among, ("constant_length", "token_mean")),
            ),
        ),
    ),
    (_above("ratio/q99", 2.0, "the policy moves far within a batch"), _policy_moves()),
    (
        _clipping,
        (
            Try("larger algorithm.surrogate.clip_low and clip_high"),
            Try("fewer train.updates_per_batch", ("train.updates_per_batch", operator.eq, 1)),
        ),
    ),
    (
        _above("sampler_gap/mean", 0.02, "sampler and trainer disagree"),
        (
            Try("algorithm.weight: truncated", ("algorithm.weight", operator.is_not, None)),
            Try("dtype: float32", ("dtype", operator.eq, "float32")),
        ),
    ),
    (
        _above("kl/completion_k1", 10.0, "the policy has drifted far from the reference"),
        (Try("a larger algorithm.kl.coef"), Try("a smaller train.lr")),
    ),
    (
        _share("text/repetition", 0.3, "of what is written repeats itself"),
        (Try("a smaller train.lr"), Try("algorithm.kl, a pull to where it began", HAS_KL)),
    ),
    (_flat, (Try("a train.lr three times as large"), Try("more train.steps"))),
)
"""(what it sees, what to change), the likeliest causes of not learning first."""


def explain(metrics: Records, evals: Records = (), setting: Setting = unknown) -> list[Remark]:
    """All that stands out in the records of `metrics.jsonl` and `evals.jsonl`."""
    seen = Seen(metrics, evals, setting)
    return [
        Remark(found, ", or ".join(t.what for t in remedies if t.applies(setting)))
        for rule, remedies in RULES
        if (found := rule(seen)) is not None
    ]


def no_signal(metrics: Records, setting: Setting) -> str:
    """Why steps had no advantage at all, and what to do about it."""
    share = {
        kind: sum(r.get(f"groups/dead_{kind}") or 0.0 for r in metrics) / max(len(metrics), 1)
        for kind in ("right", "wrong", "unscorable")
    }
    share["other"] = 1.0 - sum(share.values())
    likeliest = max(share, key=lambda kind: share[kind])
    remedy = {
        "right": "The problems are too easy: take harder ones, or end here",
        "wrong": "The problems are too hard, or the rewards miss right answers (look at rollouts/): begin "
        "with a supervised stage, raise rollout.group_size, or raise rollout.max_tokens if many are cut",
        "unscorable": "The rewards do not judge: mend them, raise scoring.timeout, or look at their columns",
        "other": "Right and wrong answers got the same: look at the weights of the rewards",
    }[likeliest]
    if likeliest == "wrong" and _mean(metrics, "length/truncated") > 0.5:
        remedy = "Most are cut before they give an answer: raise rollout.max_tokens"
    if narrow := _narrow(Seen(metrics, (), setting)):
        remedy = f"{narrow[0].upper()}{narrow[1:]}: raise it"
    if likeliest == "other" and _mean(metrics, "groups/dead") < 0.5:
        remedy = "Rewards differ within groups, so it is algorithm.advantage that gives every answer 0"
        if setting("rollout.mask_truncated") is True and _mean(metrics, "length/truncated") > 0.5:
            remedy = "rollout.mask_truncated trains no completion that is cut: raise rollout.max_tokens"
    return (
        f"{share['right']:.0%} of the groups were all right, {share['wrong']:.0%} all wrong, "
        f"{share['unscorable']:.0%} unscorable. {remedy}"
    )
