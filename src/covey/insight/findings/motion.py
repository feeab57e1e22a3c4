"""Rules about how far updates move the policy: too far at once, too late, or under another policy."""

from __future__ import annotations

import math

from covey.insight.evidence import errors_needed, known_values, noise
from covey.insight.findings.remedies import (
    CORRECTION,
    FEWER_UPDATES,
    SMALLER_LR,
    TENTH_OF_LR,
    ChangeTo,
    ScaleBy,
)
from covey.insight.findings.rule import OUTCOMES, STILL, Rule
from covey.insight.findings.view import WIDEST, RunView, mean_of
from covey.system.text import percent

BEYOND_DOUBT = 5.0
"""Nats a completion: an update that moves the policy so far needs no further proof."""


def leap(run: RunView) -> float:
    """Return how far an update of the first steps moved the policy, in nats per completion; later NaN."""
    if run.steps > WIDEST:
        return math.nan
    # kl/start is measured before the updates of its own step, so these do not count.
    updates = sum(known_values(run.beginning[:-1], "optimizer/updates"))
    return mean_of(run.beginning[-1:], "kl/start") / updates if updates else math.nan


def tenth_after_a_leap(run: RunView) -> str | None:
    """Return a tenth of the learning rate, if an update moves the policy by more than half a nat."""
    return TENTH_OF_LR(run) if leap(run) > 0.5 else None


def bonus_raises_entropy(run: RunView) -> str | None:
    """Under an entropy bonus of .05 or more, the entropy is more than 1.5 times the first step's, and
    higher by more than .3 nats per token.
    """
    coef = run.setting("algorithm.entropy.coef")
    before = mean_of(run.beginning[:1], "entropy/sampled")
    after = run.last[-1].get("entropy/sampled") if run.last else None
    if after is None or not isinstance(coef, int | float) or coef < 0.05:
        return None
    if not (after > 1.5 * before and after > before + 0.3):
        return None
    return (
        f"the entropy rose from {before:.2g} to {after:.2g} nats per token under a bonus of {coef:g}: it "
        "pays more than the rewards do"
    )


def an_update_breaks_the_policy(run: RunView) -> str | None:
    """In the first 20 steps, an update moves the policy by more than half a nat per completion, and the
    reward of the last two steps is lower than in the first, by .6 of its std or by half. The fall is beyond
    chance, or an update moves the policy by more than five nats.
    """
    moved = leap(run)
    first = run.beginning[:1]
    reward = noise([run.beginning], "reward/mean")
    # The first step's rewards are from the untrained policy, so they are the baseline.
    before = mean_of(first, "reward/mean")
    std = mean_of(first, "reward/std")
    after = mean_of(run.beginning[1:][-2:], "reward/mean")
    # Either by .6 std, or to less than half of a first reward that is not nearly 0 itself.
    fell = before - after > 0.6 * std or 0.2 * std < before > 2 * after
    # The difference of one step and the mean of two.
    doubt = reward.error(1, 2) * errors_needed(reward.freedom, run.steps) if moved < BEYOND_DOUBT else 0.0
    if not (moved > 0.5 and fell and before - after > doubt):
        return None
    lr = max(known_values(run.beginning, "optimizer/lr"), default=math.nan)
    return (
        f"an update moves the policy by {moved:.3g} nats per completion, the reward fell from {before:.2g} "
        f"to {after:.2g}: the learning rate, {lr:.1e} by now, is far too high"
    )


def ratios_are_wide(run: RunView) -> str | None:
    """The 99 % quantile of the ratio is above 2 in half of the last steps."""
    wide = run.usual("ratio/q99")
    size = run.setting("rollout.group_size")
    if not wide > 2:
        return None
    large = isinstance(size, int) and size >= 32
    reason = f": in groups of {size} one success gets {(size - 1) / size**0.5:.1f}" if large else ""
    return f"the policy moves far within a batch (ratio/q99 {wide:.2g}){reason}"


def tokens_are_clipped(run: RunView) -> str | None:
    """More than a fifth of the tokens are clipped."""
    parts = [run.late("clip/low"), run.late("clip/high")]
    part = sum(value for value in parts if not math.isnan(value))  # other trainers log one number
    return f"{percent(part)} of the tokens are clipped and contribute no gradient" if part > 0.2 else None


def tokens_are_stale(run: RunView) -> str | None:
    """Under rollout.staleness, the log-probabilities of the trained policy differ by more than .3 nats from
    those with which the tokens were sampled.
    """
    staleness = run.late("staleness/mean")
    mismatch = run.late("mismatch/mean")
    if not (staleness > 0 and mismatch > 0.3):
        return None
    return f"tokens are trained {staleness:.1f} updates late, when the policy is {mismatch:.2g} nats off"


def sampler_and_trainer_differ(run: RunView) -> str | None:
    """Sampler and trainer differ by more than .05 nats per token, and no token is stale."""
    mean = run.late("mismatch/mean")
    stale = run.late("staleness/mean") > 0
    differ = mean > 0.05 and not stale
    return f"sampler and trainer disagree by {mean:.2g} nats per token" if differ else None


BROKEN = (*OUTCOMES, "wide_ratios", "clipped", "truncated", "unparsable", "repetition", "end_token")
BROKEN_REWARDS = ("critic", "stale", "conflict", "mixed_scripts", "farmed")
RULES = (
    Rule(
        "entropy_bonus",
        bonus_raises_entropy,
        severity="severe",
        reason="Bonuses in use are .0001 to .01. A larger one is learned before anything else, by writing "
        "at random.",
        remedies=(ChangeTo("algorithm.entropy.coef", 0.001),),
        silences=(*BROKEN, *BROKEN_REWARDS, "leaps", "too_hot"),
    ),
    Rule(
        "leaps",
        an_update_breaks_the_policy,
        severity="severe",
        reason="Published runs take hundreds of updates for 5 to 10 nats. An update that goes so far leaves "
        "the region in which its gradient is valid.",
        remedies=(TENTH_OF_LR,),
        silences=(*BROKEN, *BROKEN_REWARDS, "sure_from_start"),
    ),
    Rule(
        "wide_ratios",
        ratios_are_wide,
        after=3,
        reason="The loss is valid near the policy that sampled. A ratio of 2 is far outside every clip "
        "bound in use.",
        remedies=(tenth_after_a_leap, *FEWER_UPDATES, SMALLER_LR),
        silences=("clipped", "worse", "kl_growth", "entropy_collapse", "duplicates", *STILL),
    ),
    Rule(
        "clipped",
        tokens_are_clipped,
        after=3,
        reason="Clipped tokens were sampled and scored and teach nothing. Published runs clip less than a "
        "twentieth (GSPO, which clips whole completions, a seventh).",
        remedies=(*FEWER_UPDATES, ScaleBy("algorithm.surrogate.clip_high", 1.4, 0.28)),
        silences=("flat",),
    ),
    Rule(
        "stale",
        tokens_are_stale,
        after=5,
        reason="Ratios of e^.3 are outside of the usual clip bounds. In our measurements .1 nats cost "
        "nothing, .2 a tenth more steps and .33 a quarter more.",
        remedies=(CORRECTION, ScaleBy("rollout.staleness", 0.5, 1), SMALLER_LR),
        silences=("mismatch", "worse", "kl_growth", *STILL),
    ),
    Rule(
        "mismatch",
        sampler_and_trainer_differ,
        reason="Rounding to bfloat16 alone gave .02 in a model of 135M parameters, on a GPU. Above that, the "
        "ratio measures the sampler and not the policy's motion.",
        remedies=(CORRECTION, ChangeTo("dtype", "float32")),
        silences=("worse", "kl_growth", *STILL),
    ),
)
