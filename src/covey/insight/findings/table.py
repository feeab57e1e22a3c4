"""All rules in their order, and what they say of a recorded run or of steps without a signal."""

from __future__ import annotations

from collections.abc import Sequence

from covey.estimates import Evaluation
from covey.insight.evidence import Records
from covey.insight.findings import gradient, motion, policy, progress, rewards, sampling
from covey.insight.findings.finding import Finding
from covey.insight.findings.rule import Rule, find
from covey.insight.findings.settings import SettingOf
from covey.insight.findings.view import WIDEST, RunView, mean_of

RULES: tuple[Rule, ...] = (
    *sampling.RULES,
    *rewards.RULES,
    *gradient.RULES,
    *motion.RULES,
    *policy.RULES,
    *progress.RULES,
)
"""Causes first."""
CANNOT_SAY = ("paid_by_model", "no_motion", "flat", "kl_growth", "held_out_flat", "worse")
"""Rules that cannot say why steps had no signal."""
MOST_LOOKS = 400
"""A recorded run is looked at after every step; a long one after so many steps, evenly spaced."""


def explain(
    metrics: Records, evals: Records, setting: SettingOf, rules: Sequence[Rule] = RULES
) -> list[Finding]:
    """The findings that a run would have made step by step, from its records."""
    found: list[Finding] = []
    taken = [(int(r["step"]), Evaluation.from_record(r)) for r in evals]
    for n in _looks(len(metrics)):
        step = int(metrics[n - 1]["step"])
        known = [e for at, e in taken if at <= step or n == len(metrics)]
        # As a run that watches itself has it: no rule looks at the steps between the first and the last.
        shown = [*metrics[: min(n, WIDEST)], *metrics[max(WIDEST, n - WIDEST) : n]]
        found += find(rules, RunView(shown, known, setting, steps=n), [f.id for f in found], step)
    return found


def _looks(steps: int) -> list[int]:
    every = -(-steps // MOST_LOOKS) or 1
    return sorted({*range(every, steps + 1, every), *([steps] if steps else [])})


def gravest(said: Sequence[Finding]) -> Finding | None:
    """The finding that best explains why a run ended badly: the most severe, the first of equals.

    `worse` is the verdict itself, so it explains only if nothing but notes was found besides.
    """
    weights = {"severe": 0, "warning": 1, "worse": 2, "note": 3}
    ranked = sorted(said, key=lambda f: weights["worse" if f.id == "worse" else f.severity])
    return ranked[0] if ranked else None


def likely(metrics: Records, evals: Records, setting: SettingOf) -> Finding | None:
    """The finding that best explains how a whole run ended, however short it was."""
    measured = [Evaluation.from_record(e) for e in evals]
    found = find(RULES, RunView(metrics, measured, setting, patient=False), (), len(metrics))
    return found[0] if found else None


def _explaining(found: Sequence[Finding], said: Sequence[Finding]) -> list[Finding]:
    """Those of ``said`` that are severe and explain the first of ``found``, or are the same."""
    silences = {rule.name: rule.silences for rule in RULES}
    if not found:
        return [f for f in said if f.severity == "severe"]
    first = found[0].id
    return [f for f in said if f.id == first or first in silences.get(f.id, ())]


def no_signal(metrics: Records, setting: SettingOf, said: Sequence[Finding] = ()) -> str:
    """Why steps had no advantage at all, and what to do about it; asked by the guard that ends a run.

    ``said``: what the run had found before. If that explains what is found now, it stays the reason, so that
    the last word of a run is not a different one.
    """
    kinds = ("correct", "incorrect", "unscored")
    shares = {kind: mean_of(metrics, f"groups/dead_{kind}") for kind in kinds}
    correct, incorrect, unscored = (share if share > 0 else 0.0 for share in shares.values())
    rules = [rule for rule in RULES if rule.name not in CANNOT_SAY]
    masked = setting("rollout.mask_truncated") is True
    if masked and mean_of(metrics, "length/truncated") > 0.99:  # no token is left to train, whatever was paid
        rules = [rule for rule in rules if rule.name == "truncated"]
    elif mean_of(metrics, "groups/dead") < 0.5 and not masked:
        # Rewards differ and all advantages are 0: only the estimator can be the reason.
        rules = [rule for rule in rules if rule.name == "zero_advantage"]
    found = find(rules, RunView(metrics, (), setting, patient=False), (), 0)
    found = _explaining(found, said) or found
    why = str(found[0]) if found else "look at rollouts/: what should the rewards have told apart?"
    live = 1 - mean_of(metrics, "groups/dead")
    if live > 0.01 and mean_of(metrics, "rollout/filtered") >= mean_of(metrics, "groups/count"):
        why = f"algorithm.filter leaves every group out, also the {live:.0%} in which rewards differ"
        why += ". Try: algorithm.filter: informative"
    counted = f"{correct:.0%} of the groups were all correct, {incorrect:.0%} all incorrect"
    return f"{counted}, {unscored:.0%} unscored. {why[0].upper()}{why[1:]}"
