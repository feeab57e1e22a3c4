"""What a run's metrics mean, in words, and which setting to change: one rule a pathology.

A rule reads the metrics over the first and the last fifth of the steps, says what it has seen, or
nothing. Thresholds are starting points for reasoning tasks with 0/1 rewards; docs/metrics.md has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Records = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Remark:
    """One thing that stands out."""

    finding: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.finding}. Try: {self.remedy}"


class Seen:
    """Means of metrics early and late in a run; NaN where there are none, so that no rule holds."""

    def __init__(self, metrics: Records, evals: Records = ()) -> None:
        fifth = max(1, len(metrics) // 5)
        self.first, self.last, self.evals = metrics[:fifth], metrics[-fifth:], evals

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
        return self.evals[-1]["pass@1"] - self.evals[0]["pass@1"] if len(self.evals) > 1 else math.nan


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
    entropy, unsolved = seen.late("entropy"), seen.late("accuracy") < 0.9
    fell = entropy < 0.05 and seen.early("entropy") > 2 * entropy
    return f"entropy fell to {entropy:.3f} nats: exploration has ended" if fell and unsolved else None


def _farming(seen: Seen) -> str | None:
    rise, gain = seen.rise("reward/mean"), seen.held_out_gain()
    if not (rise > 0.3 * seen.early("reward/std") and gain < 0.02):
        return None
    return f"the reward rose by {rise:.2f}, held-out accuracy changed by {100 * gain:+.0f} points"


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


RULES: tuple[tuple[Callable[[Seen], str | None], str], ...] = (
    (
        _share("reward/unscorable", 0.05, "of the completions could not be judged"),
        "`covey score` on some of them: what do the reward functions say?",
    ),
    (
        _share("groups/dead_wrong", 0.5, "of the groups tie because every answer is wrong"),
        "a cold start (a stage with method: sft), easier problems, or a larger rollout.group_size",
    ),
    (
        _share("groups/dead_right", 0.5, "of the groups tie because every answer is right"),
        "algorithm.filter: informative, rollout.curriculum: frontier, or harder problems",
    ),
    (
        _share("length/truncated", 0.1, "of the completions were cut at rollout.max_tokens"),
        "a larger rollout.max_tokens, or the reward soft_overlong",
    ),
    (_collapse, "a smaller train.lr, or algorithm.surrogate.clip_high 0.28"),
    (_farming, "reading rollouts/ and `covey stress`: the reward pays for something else than the answer"),
    (_conflict, "other weights in rewards, or gated_by, so that the one counts only where the other is met"),
    (_length_bias, "algorithm: dr_grpo, whose loss does not divide by the length"),
    (
        _above("ratio/q99", 2.0, "the policy moves far within a batch"),
        "a smaller train.lr, or fewer train.updates_per_batch and train.inner_epochs",
    ),
    (_clipping, "larger algorithm.surrogate.clip_low and clip_high, or fewer train.updates_per_batch"),
    (
        _above("sampler_gap/mean", 0.02, "sampler and trainer disagree"),
        "algorithm.weight: truncated, or dtype: float32",
    ),
    (
        _above("kl/completion_k1", 10.0, "the policy has drifted far from the reference"),
        "a larger algorithm.kl.coef, or a smaller train.lr",
    ),
    (_share("text/repetition", 0.3, "of what is written repeats itself"), "a smaller train.lr, or a KL term"),
    (_flat, "a train.lr three times as large, or more train.steps"),
)
"""(what it sees, what to change), the likeliest causes of not learning first."""


def explain(metrics: Records, evals: Records = ()) -> list[Remark]:
    """All that stands out in the records of `metrics.jsonl` and `evals.jsonl`."""
    seen = Seen(metrics, evals)
    return [Remark(found, remedy) for rule, remedy in RULES if (found := rule(seen)) is not None]
