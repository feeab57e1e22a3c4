"""The rule, and the findings of rules that apply."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from covey.insight.findings.finding import Finding, Severity
from covey.insight.findings.view import RunView
from covey.types import Group

NO_SIGNAL = ("too_hard", "too_easy", "tied", "dead_weight", "zero_advantage")
STILL = ("flat", "no_motion", "held_out_flat")
OUTCOMES = (*NO_SIGNAL, *STILL, "worse", "entropy_collapse", "duplicates", "kl_growth", "length_bias")
"""Names of rules that many silence: the findings in which any bad reward may end."""
Predicate = Callable[[RunView], str | None]
"""A sentence with the numbers if the rule applies to the run, else None."""
Remedy = Callable[[RunView], str | None]
"""The config line that helps; None if the run's config has it already."""
Strength = Callable[[Group, int], float]
"""A score of how clearly a completion of a group shows the finding; 0 or less means not at all."""


@dataclass(frozen=True)
class Rule:
    """A cause of trouble: how it is recognised, why that matters, what helps."""

    name: str
    predicate: Predicate
    reason: str
    """The reason for the threshold."""
    remedies: tuple[Remedy, ...]
    """Config lines, the best first. The first line that the config lacks is shown."""
    after: int = 0
    """Number of steps that a run needs before the rule is tested."""
    severity: Severity = "warning"
    advice: str = ""
    silences: tuple[str, ...] = ()
    """Names of rules that are not tested after this one applied: they would report its consequences."""
    shown_by: Strength | None = None
    """Score of a completion as an example; the completion with the highest one is shown."""
    token: Callable[[Group, int], int] | None = None

    @property
    def family(self) -> str:
        """Name of the file that has the rule."""
        return self.predicate.__module__.rpartition(".")[2]

    @property
    def condition(self) -> str:
        """The condition of the rule, in a sentence: its first step and the predicate's own description."""
        text = " ".join((inspect.getdoc(self.predicate) or "").split())
        return f"From step {self.after}: {text[0].lower()}{text[1:]}" if self.after else text


def find(
    rules: Sequence[Rule], run: RunView, earlier: Iterable[str], step: int, groups: Sequence[Group] = ()
) -> list[Finding]:
    """Return new findings after a step, given the ids of ``earlier`` ones. Causes come before effects."""
    silent = set(earlier)
    silent |= {name for rule in rules if rule.name in silent for name in rule.silences}
    findings = []
    for rule in rules:
        if rule.name in silent or not run.after(rule.after):
            continue
        # The view notes every metric that the predicate reads: these are the evidence.
        run.read.clear()
        sentence = rule.predicate(run)
        if sentence is not None:
            findings.append(_make_finding(rule, sentence, run, step, groups))
            silent |= set(rule.silences)
    return findings


def _make_finding(rule: Rule, sentence: str, run: RunView, step: int, groups: Sequence[Group]) -> Finding:
    metrics = {name: round(value, 6) for name, value in run.read.items() if math.isfinite(value)}
    evidence = {"step": step, **_best_shown(rule, groups), **metrics}
    lines = (remedy(run) for remedy in rule.remedies)
    remedy = next((line for line in lines if line and line not in run.tried), "")
    return Finding(rule.name, step, rule.severity, sentence, remedy, rule.advice, evidence)


def _best_shown(rule: Rule, groups: Sequence[Group]) -> dict[str, int]:
    """Return the group, completion and token that show the finding best; the first of equally good ones."""
    if rule.shown_by is None:
        return {}
    highest = 0.0
    best = None
    for number, group in enumerate(groups):
        for sample in range(len(group.completions)):
            score = rule.shown_by(group, sample)
            if score > highest:  # of equally good ones the first stays
                highest = score
                best = (number, sample)
    if best is None:
        return {}
    number, sample = best
    token = {"token": rule.token(groups[number], sample)} if rule.token else {}
    return {"group": number, "completion": sample, **token}
