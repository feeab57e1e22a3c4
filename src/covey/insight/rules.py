"""All rules in their order, and what they say of a recorded run or of steps without a signal."""

from __future__ import annotations

from covey.insight.causes import CAUSES
from covey.insight.findings import Finding, Records, Seen, Setting, find, mean_of, replay
from covey.insight.symptoms import SYMPTOMS

RULES = (*CAUSES, *SYMPTOMS)
"""Causes first."""
NO_ANSWER = ("paid_by_model", "no_motion", "flat", "kl_growth", "held_out_flat", "worse")
"""Rules that cannot say why steps had no signal."""


def explain(metrics: Records, evals: Records, setting: Setting) -> list[Finding]:
    """What a run would have said step by step, from its records."""
    return replay(RULES, metrics, evals, setting)


def no_signal(metrics: Records, setting: Setting) -> str:
    """Why steps had no advantage at all, and what to do about it: asked by the guard that ends a run."""
    kinds = ("correct", "incorrect", "unscored")
    shares = {kind: mean_of(metrics, f"groups/dead_{kind}") for kind in kinds}
    rules = [rule for rule in RULES if rule.id not in NO_ANSWER]
    found = find(rules, Seen(metrics, (), setting, patient=False), (), 0)
    why = str(found[0]) if found else "Look at rollouts/: what should the rewards have told apart?"
    said = ", ".join(f"{share:.0%} all {kind}" for kind, share in shares.items() if share > 0)
    return f"{said or 'no group was all correct or all incorrect'} of the groups. {why}"
