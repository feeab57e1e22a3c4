"""Define a check of a record, and turn checks that fail into findings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from covey.audit.record import AuditRecord
from covey.insight.findings.finding import Finding, Severity


class Trouble(NamedTuple):
    """What a check has found: a sentence with the numbers, and where it can be seen."""

    sentence: str
    step: int = 0
    evidence: Mapping[str, int | float] = {}
    """The group, completion and token that show it; numbers by name."""


@dataclass(frozen=True)
class Check:
    """A mistake that a record can show."""

    name: str
    predicate: Callable[[AuditRecord], Trouble | None]
    """Its docstring is the condition."""
    needs: tuple[str, ...]
    """Fields without which it cannot be judged; `a or b`: either of them."""
    convention: str
    """What is done instead, and by whom."""
    remedies: Mapping[str, str] = field(default_factory=dict)
    """Framework -> the line to change, in its words; `any`: in everybody's."""
    severity: Severity = "severe"
    silences: tuple[str, ...] = ()
    """Checks that would report its consequences."""

    @property
    def condition(self) -> str:
        """When it is found, in a sentence."""
        return " ".join((inspect.getdoc(self.predicate) or "").split())

    def lacking(self, record: AuditRecord) -> list[str]:
        """Return the fields that it needs and the record lacks."""
        return [need for need in self.needs if not record.fields & set(need.split(" or "))]


class Report(NamedTuple):
    """What an audit has found and what it could not judge."""

    findings: list[Finding]
    unjudged: dict[str, list[str]]
    """Field that the record lacks -> names of the checks that need it."""
    judged: int
    """Number of checks that could be applied."""


def apply(checks: Sequence[Check], record: AuditRecord) -> Report:
    """Apply checks in their order: the most certain first, causes before their consequences."""
    findings: list[Finding] = []
    unjudged: dict[str, list[str]] = {}
    silent = set[str]()
    judged = 0
    for check in checks:
        lacking = check.lacking(record)
        if lacking:
            unjudged.setdefault(" and ".join(lacking), []).append(check.name)
            continue
        judged += 1
        trouble = None if check.name in silent else check.predicate(record)
        if trouble is not None:
            findings.append(_finding(check, trouble, record.header.framework))
            silent |= set(check.silences)
    return Report(findings, unjudged, judged)


def _finding(check: Check, trouble: Trouble, framework: str) -> Finding:
    sentence = f"{trouble.sentence}; {check.convention}" if check.convention else trouble.sentence
    evidence = {"step": trouble.step, **trouble.evidence}
    remedy = check.remedies.get(framework, "")
    return Finding(
        check.name, trouble.step, check.severity, sentence, remedy, check.remedies.get("any", ""), evidence
    )
