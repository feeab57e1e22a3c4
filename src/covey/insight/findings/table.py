"""The list of all rules in their order, applied to a recorded run or to steps without a signal."""

from __future__ import annotations

from collections.abc import Sequence

from covey.insight.evidence import Records
from covey.insight.findings import gradient, motion, policy, progress, rewards, sampling
from covey.insight.findings.finding import Finding
from covey.insight.findings.rule import Rule, find
from covey.insight.findings.settings import SettingOf
from covey.insight.findings.view import WIDEST, RunView, mean_of
from covey.runs.estimates import Evaluation
from covey.system.text import percent

RULES: tuple[Rule, ...] = (
    *sampling.RULES,
    *rewards.RULES,
    *gradient.RULES,
    *motion.RULES,
    *policy.RULES,
    *progress.RULES,
)
"""All rules, causes before effects."""
CANNOT_SAY = ("paid_by_model", "no_motion", "flat", "kl_growth", "held_out_flat", "worse")
"""Rules that cannot say why steps had no signal."""
MAX_LOOKS = 400
"""Largest number of steps after which the rules are applied to a recorded run, evenly spaced."""


def explain(metrics: Records, evals: Records, setting: SettingOf) -> list[Finding]:
    """Return the findings that a run would have made step by step, from its records."""
    findings: list[Finding] = []
    evaluations = [(int(r["step"]), Evaluation.from_record(r)) for r in evals]
    for n in _looks(len(metrics)):
        step = int(metrics[n - 1]["step"])
        # A run looks at a step before it evaluates after it; the last evaluation belongs to the last look.
        evaluations_so_far = [evaluation for at, evaluation in evaluations if at < step or n == len(metrics)]
        # The same steps as in a run that watches itself: no rule reads those between the first and the last.
        kept_steps = [*metrics[: min(n, WIDEST)], *metrics[max(WIDEST, n - WIDEST) : n]]
        view = RunView(kept_steps, evaluations_so_far, setting, steps=n)
        findings += find(RULES, view, [finding.id for finding in findings], step)
    return findings


def _looks(steps: int) -> list[int]:
    """Return the numbers of steps after which the rules are applied; the last is ``steps`` itself."""
    stride = -(-steps // MAX_LOOKS) or 1
    looks = set(range(stride, steps + 1, stride))
    if steps:
        looks.add(steps)
    return sorted(looks)


def gravest(findings: Sequence[Finding]) -> Finding | None:
    """Return the finding that best explains a bad end: the first of the most severe ones.

    `worse` is the bad end itself, so it explains only if nothing but notes was found besides.
    """
    weights = {"severe": 0, "warning": 1, "worse": 2, "note": 3}
    ranked = sorted(findings, key=lambda f: weights["worse" if f.id == "worse" else f.severity])
    return ranked[0] if ranked else None


def likely(metrics: Records, evals: Records, setting: SettingOf) -> Finding | None:
    """Return the finding that best explains how a whole run ended, however short it was."""
    measured = [Evaluation.from_record(e) for e in evals]
    findings = find(RULES, RunView(metrics, measured, setting, patient=False), (), len(metrics))
    return findings[0] if findings else None


def _find_explanations(findings: Sequence[Finding], earlier: Sequence[Finding]) -> list[Finding]:
    """Return the ``earlier`` findings that explain the first of ``findings``, or repeat it.

    If there are no ``findings``, these are the severe ones.
    """
    if not findings:
        return [f for f in earlier if f.severity == "severe"]
    silences = {rule.name: rule.silences for rule in RULES}
    first = findings[0].id
    return [f for f in earlier if f.id == first or first in silences.get(f.id, ())]


def _able_to_explain(metrics: Records, setting: SettingOf) -> list[Rule]:
    """Return the rules that may be the reason why steps had no advantage."""
    masked = setting("rollout.mask_truncated") is True
    if masked and mean_of(metrics, "length/truncated") > 0.99:  # no token is left to train, whatever was paid
        return [rule for rule in RULES if rule.name == "truncated"]
    if mean_of(metrics, "groups/dead") < 0.5 and not masked:
        # Rewards differ and all advantages are 0: only the estimator can be the reason.
        return [rule for rule in RULES if rule.name == "zero_advantage"]
    return [rule for rule in RULES if rule.name not in CANNOT_SAY]


def no_signal(metrics: Records, setting: SettingOf, earlier: Sequence[Finding] = ()) -> str:
    """Explain why steps had no advantage, and what to do; the guard that ends a run calls this.

    ``earlier`` has the findings that the run has made. If they explain the present ones, they stay the
    reason, so that a run does not contradict itself in its last message.
    """
    kinds = ("correct", "incorrect", "unscored")
    shares = {kind: mean_of(metrics, f"groups/dead_{kind}") for kind in kinds}
    correct, incorrect, unscored = (share if share > 0 else 0.0 for share in shares.values())
    view = RunView(metrics, (), setting, patient=False)
    findings = find(_able_to_explain(metrics, setting), view, (), 0)
    findings = _find_explanations(findings, earlier) or findings
    explanation = (
        str(findings[0]) if findings else "look at rollouts/: what should the rewards have told apart?"
    )
    # Groups with a signal exist, but the filter left out as many groups as were sampled.
    live = 1 - mean_of(metrics, "groups/dead")
    if live > 0.01 and mean_of(metrics, "rollout/filtered") >= mean_of(metrics, "groups/count"):
        explanation = (
            f"algorithm.filter leaves every group out, also the {percent(live)} in which rewards differ"
        )
        explanation += ". Try: algorithm.filter: informative"
    counted = (
        f"All completions were correct in {percent(correct)} of the groups, incorrect in "
        f"{percent(incorrect)}, and unscored in {percent(unscored)}"
    )
    return f"{counted}. {explanation[0].upper()}{explanation[1:]}"
