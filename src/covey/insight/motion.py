"""Rules that name how far updates move the policy: too far at once, too late, or under another policy."""

from __future__ import annotations

import math

from covey.insight.causes import OUTCOMES, STILL, percent
from covey.insight.evidence import errors_needed, known_values, noise
from covey.insight.findings import WIDEST, FindingRule, Seen, collector, mean_of
from covey.insight.remedies import FEWER_UPDATES, SMALLER_LR, scaled, to

MOTION: list[FindingRule] = []
_rule = collector(MOTION)
BEYOND_DOUBT = 5.0
"""Nats a completion: an update that moves so far needs no further proof."""
A_TENTH_LR = scaled("train.lr", 0.1, 1e-6)


def leap(seen: Seen) -> float:
    """How far an update of the first steps has moved the policy, nats a completion; NaN later on."""
    if seen.steps > WIDEST:
        return math.nan
    updates = sum(known_values(seen.beginning[:-1], "optimizer/updates"))
    return mean_of(seen.beginning[-1:], "kl/start") / updates if updates else math.nan


@_rule(
    "entropy_bonus",
    to("algorithm.entropy.coef", 0.001),
    severity="severe",
    explains=(
        *(*OUTCOMES, "leaps", "too_hot", "wide_ratios", "clipped", "truncated", "unparsable", "repetition"),
        *("end_token", "critic", "stale", "conflict", "mixed_scripts", "farmed"),
    ),
)
def _(seen: Seen) -> str | None:
    """With an entropy bonus of .05 or more, a token has half as much entropy again as in the first step, and
    .3 nats more. Because bonuses in use are .0001 to .01: a larger one is learned before anything else, by
    writing at random.
    """
    coef, steps = seen.setting("algorithm.entropy.coef"), seen.beginning[:1]
    before, now = (
        mean_of(steps, "entropy/sampled"),
        seen.last[-1].get("entropy/sampled") if seen.last else None,
    )
    if not (isinstance(coef, int | float) and coef >= 0.05 and now is not None):
        return None
    if not (now > 1.5 * before and now > before + 0.3):
        return None
    said = f"the entropy rose from {before:.2g} to {now:.2g} nats a token under a bonus of {coef:g}"
    return f"{said}: it pays more than the rewards do"


@_rule(
    "leaps",
    A_TENTH_LR,
    severity="severe",
    explains=(
        *(*OUTCOMES, "wide_ratios", "clipped", "truncated", "unparsable", "repetition", "end_token"),
        *("sure_from_start", "critic", "stale", "farmed", "conflict", "mixed_scripts"),
    ),
)
def _(seen: Seen) -> str | None:
    """In the first 20 steps, an update moves the policy by more than half a nat a completion, and the last
    two are paid less than the first one, by .6 of its std or by half: beyond chance, or where it is five
    nats. Because published runs take hundreds of updates for 5 to 10 nats: one that goes so far has left
    where its gradient was right.
    """
    moved, first, reward = leap(seen), seen.beginning[:1], noise([seen.beginning], "reward/mean")
    before, std = (mean_of(first, f"reward/{name}") for name in ("mean", "std"))
    now = mean_of(seen.beginning[1:][-2:], "reward/mean")
    less = before - now > 0.6 * std or 0.2 * std < before > 2 * now
    doubt = reward.error(1, 2) * errors_needed(reward.freedom, seen.steps) if moved < BEYOND_DOUBT else 0.0
    if not (moved > 0.5 and less and before - now > doubt):
        return None
    lr = max(known_values(seen.beginning, "optimizer/lr"), default=math.nan)
    said = f"an update moves the policy by {moved:.3g} nats a completion, the reward fell from {before:.2g}"
    return f"{said} to {now:.2g}: the learning rate, {lr:.1e} by now, is far too high"


@_rule(
    "wide_ratios",
    lambda seen: A_TENTH_LR(seen) if leap(seen) > 0.5 else None,
    *FEWER_UPDATES,
    SMALLER_LR,
    explains=("clipped", "worse", "kl_growth", "entropy_collapse", "duplicates", *STILL),
)
def _(seen: Seen) -> str | None:
    """From the third step, the 99 % quantile of the ratio is above 2 in half of the steps. Because the loss
    holds near the policy that sampled: a ratio of 2 is far outside every clip bound in use.
    """
    wide, size = seen.usual("ratio/q99"), seen.setting("rollout.group_size")
    if not (seen.after(3) and wide > 2):
        return None
    large = isinstance(size, int) and size >= 32
    why = f": in groups of {size} one success gets {(size - 1) / size**0.5:.1f}" if large else ""
    return f"the policy moves far within a batch (ratio/q99 {wide:.2g}){why}"


@_rule(
    "clipped",
    *FEWER_UPDATES,
    scaled("algorithm.surrogate.clip_high", 1.4, 0.28),
    explains=("flat",),
)
def _(seen: Seen) -> str | None:
    """From the third step, more than a fifth of the tokens are clipped. Because they were sampled and scored
    and teach nothing; published runs clip less than a twentieth (GSPO, by whole responses, a seventh).
    """
    part = seen.late("clip/low") + seen.late("clip/high")
    if not (seen.after(3) and part > 0.2):
        return None
    return f"{percent(part)} of the tokens are clipped and contribute no gradient"


@_rule(
    "stale",
    to("algorithm.correction", "truncated", bool),
    scaled("rollout.staleness", 0.5, 1),
    SMALLER_LR,
    explains=("mismatch", "worse", "kl_growth", *STILL),
)
def _(seen: Seen) -> str | None:
    """Under rollout.staleness, from the fifth step, the policy gives tokens that it trains probabilities more
    than .3 nats off those they were drawn with. Because ratios of e^.3 are outside of the usual clips; in
    the measured runs .1 nats cost nothing, .2 a tenth more steps and .33 a quarter.
    """
    late, off = seen.late("staleness/mean"), seen.late("mismatch/mean")
    if not (seen.after(5) and late > 0 and off > 0.3):
        return None
    return f"tokens are trained {late:.1f} updates late, when the policy is {off:.2g} nats off"


@_rule(
    "mismatch",
    to("algorithm.correction", "truncated", bool),
    to("dtype", "float32"),
    explains=("worse", "kl_growth", *STILL),
)
def _(seen: Seen) -> str | None:
    """Sampler and trainer differ by more than .02 nats a token, and no token is stale. Because rounding to
    bfloat16 stays below .01; above, the ratio measures the sampler and not the policy's motion.
    """
    mean, stale = seen.late("mismatch/mean"), seen.late("staleness/mean") > 0
    differ = mean > 0.02 and not stale
    return f"sampler and trainer disagree by {mean:.2g} nats a token" if differ else None
