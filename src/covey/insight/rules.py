"""All rules in their order, and what they say of a recorded run or of steps without a signal."""

from __future__ import annotations

from collections.abc import Sequence

from covey.estimates import Evaluation
from covey.insight.causes import CAUSES
from covey.insight.evidence import Records
from covey.insight.findings import Finding, Seen, SettingOf, find, findings_over, mean_of
from covey.insight.motion import MOTION
from covey.insight.sampling import SAMPLING
from covey.insight.symptoms import SYMPTOMS

RULES = (*SAMPLING, *CAUSES, *MOTION, *SYMPTOMS)
"""Causes first."""
CANNOT_SAY = ("paid_by_model", "no_motion", "flat", "kl_growth", "held_out_flat", "worse")
"""Rules that cannot say why steps had no signal."""


def explain(metrics: Records, evals: Records, setting: SettingOf) -> list[Finding]:
    """What a run would have said step by step, from its records."""
    return findings_over(RULES, metrics, evals, setting)


def gravest(said: Sequence[Finding]) -> Finding | None:
    """Of what a run has found that which explains best why it ended badly: the most severe, said first.

    That it got worse is the verdict itself, so it explains only where nothing else but notes was found.
    """
    weights = {"severe": 0, "warning": 1, "worse": 2, "note": 3}
    ranked = sorted(said, key=lambda f: weights["worse" if f.id == "worse" else f.severity])
    return ranked[0] if ranked else None


def likely(metrics: Records, evals: Records, setting: SettingOf) -> Finding | None:
    """What explains best how a whole run ended, however short it was."""
    measured = [Evaluation.from_record(e) for e in evals]
    found = find(RULES, Seen(metrics, measured, setting, patient=False), (), len(metrics))
    return found[0] if found else None


def _explaining(found: Sequence[Finding], said: Sequence[Finding]) -> list[Finding]:
    """Those of ``said`` that are grave and explain the first of ``found``, or are the same."""
    explains = {rule.id: rule.explains for rule in RULES}
    ids = {f.id for f in found[:1]}
    grave = [f for f in said if f.severity == "severe"] if not found else list(said)
    return [f for f in grave if not found or f.id in ids or ids & set(explains.get(f.id, ()))]


def no_signal(metrics: Records, setting: SettingOf, said: Sequence[Finding] = ()) -> str:
    """Why steps had no advantage at all, and what to do about it: asked by the guard that ends a run.

    ``said``: what the run had found before. Where that explains what is found now it stays the reason, so
    that the last word of a run is not another one.
    """
    kinds = ("correct", "incorrect", "unscored")
    shares = {kind: mean_of(metrics, f"groups/dead_{kind}") for kind in kinds}
    correct, incorrect, unscored = (share if share > 0 else 0.0 for share in shares.values())
    rules = [rule for rule in RULES if rule.id not in CANNOT_SAY]
    masked = setting("rollout.mask_truncated") is True
    if masked and mean_of(metrics, "length/truncated") > 0.99:  # no token is left to train, whatever was paid
        rules = [rule for rule in rules if rule.id == "truncated"]
    elif mean_of(metrics, "groups/dead") < 0.5 and not masked:
        # Rewards differ and all advantages are 0: nothing but the estimator can be why.
        rules = [rule for rule in rules if rule.id == "zero_advantage"]
    found = find(rules, Seen(metrics, (), setting, patient=False), (), 0)
    found = _explaining(found, said) or found
    why = str(found[0]) if found else "look at rollouts/: what should the rewards have told apart?"
    live = 1 - mean_of(metrics, "groups/dead")
    if live > 0.01 and mean_of(metrics, "rollout/filtered") >= mean_of(metrics, "groups/count"):
        why = f"algorithm.filter leaves every group out, also the {live:.0%} in which rewards differ"
        why += ". Try: algorithm.filter: informative"
    counted = f"{correct:.0%} of the groups were all correct, {incorrect:.0%} all incorrect"
    return f"{counted}, {unscored:.0%} unscored. {why[0].upper()}{why[1:]}"
