"""What a rule is, and how rules become findings."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from covey.insight.findings.finding import Finding, Severity
from covey.insight.findings.view import RunView
from covey.types import Group

Predicate = Callable[[RunView], str | None]
"""A sentence with the numbers if the rule applies to the run, else None."""
Remedy = Callable[[RunView], str | None]
"""The config line that helps; None if the run's config has it already."""
Strength = Callable[[Group, int], float]
"""How clearly a completion of a group shows the finding; 0 or less: not at all."""


@dataclass(frozen=True)
class Rule:
    """A cause of trouble: how it is recognised, why that matters, what helps."""

    name: str
    predicate: Predicate
    reason: str
    """Why the threshold is where it is."""
    remedies: tuple[Remedy, ...]
    """The first one that the config lacks is shown."""
    after: int = 0
    """Steps that a run needs before the rule is asked."""
    severity: Severity = "warning"
    advice: str = ""
    silences: tuple[str, ...] = ()
    """Rules that say nothing after this one has spoken: what they see follows from it."""
    shown_by: Strength | None = None
    """Points at the completion that shows it best."""
    token: Callable[[Group, int], int] | None = None

    @property
    def family(self) -> str:
        """The file that it is in."""
        return self.predicate.__module__.rpartition(".")[2]

    @property
    def condition(self) -> str:
        """When the rule applies, in a sentence: its first step and the predicate's own description."""
        text = " ".join((inspect.getdoc(self.predicate) or "").split())
        return f"From step {self.after}: {text[0].lower()}{text[1:]}" if self.after else text


def find(
    rules: Sequence[Rule], run: RunView, known: Iterable[str], step: int, groups: Sequence[Group] = ()
) -> list[Finding]:
    """New findings after a step, given the names of ``known`` ones; causes come before what they silence."""
    silent = set(known)
    silent |= {name for rule in rules if rule.name in silent for name in rule.silences}
    found = []
    for rule in rules:
        if rule.name in silent or not run.after(rule.after):
            continue
        run.read.clear()
        sentence = rule.predicate(run)
        if sentence is not None:
            found.append(_finding(rule, sentence, run, step, groups))
            silent |= set(rule.silences)
    return found


def _finding(rule: Rule, sentence: str, run: RunView, step: int, groups: Sequence[Group]) -> Finding:
    metrics = {name: round(value, 6) for name, value in run.read.items() if math.isfinite(value)}
    evidence = {"step": step, **_best_shown(rule, groups), **metrics}
    lines = (remedy(run) for remedy in rule.remedies)
    remedy = next((line for line in lines if line), "")
    return Finding(rule.name, step, rule.severity, sentence, remedy, rule.advice, evidence)


def _best_shown(rule: Rule, groups: Sequence[Group]) -> dict[str, int]:
    """Group and completion that show it best, the first of equals, and the token."""
    if rule.shown_by is None:
        return {}
    places = [(rule.shown_by(g, i), -n, -i) for n, g in enumerate(groups) for i in range(len(g.completions))]
    best, n, i = max(places, default=(0.0, 0, 0))
    if not best > 0:
        return {}
    token = {"token": rule.token(groups[-n], -i)} if rule.token else {}
    return {"group": -n, "completion": -i, **token}


def markdown(rules: Sequence[Rule]) -> Iterator[str]:
    """The rules as sections of docs/findings.md, one for each family."""
    for family, members in groupby(rules, key=lambda rule: rule.family):
        yield from (f"### {family.capitalize()}", "")
        yield "| finding | condition | reason | silences |"
        yield "|---|---|---|---|"
        for r in members:
            yield f"| `{r.name}` ({r.severity}) | {r.condition} | {r.reason} | {', '.join(r.silences)} |"
        yield ""
