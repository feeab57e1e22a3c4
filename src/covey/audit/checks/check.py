"""Checks of a record, and the findings of failed checks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter

from covey.audit.frameworks import FRAMEWORKS
from covey.audit.record import AuditRecord
from covey.insight.findings.finding import Finding, Severity


class Fault(NamedTuple):
    """A mistake that a check has found: a sentence with the numbers, and the place of an example."""

    sentence: str
    step: int = 0
    evidence: Mapping[str, int | float] = {}
    """The group, completion and token that show it; numbers by name."""


class MissingField(NamedTuple):
    """The field without which a check, once it has begun, turns out to be unable to judge."""

    field: str


Predicate = Callable[[AuditRecord], Fault | MissingField | None]
"""Returns the fault in a record, None if there is none; its docstring is the condition."""


class CheckText(BaseModel):
    """The words of a check: a row of `checks.yaml`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    severity: Severity
    needs: tuple[str, ...]
    """Fields without which the check cannot judge; `a or b`: either of them."""
    convention: str = ""
    """The usual practice, and who follows it."""
    any: str = ""
    """The remedy, without the words of any framework."""
    trl: str = ""
    """The line to change, in the words of TRL; the two below are in those of their frameworks."""
    verl: str = ""
    openrlhf: str = ""
    silences: tuple[str, ...] = ()
    """Checks that would only report the consequences of this mistake."""


def check_texts() -> dict[str, CheckText]:
    """Return the words of all checks by name, in the order of their certainty."""
    text = (files("covey") / "audit" / "checks" / "checks.yaml").read_text(encoding="utf-8")
    return TypeAdapter(dict[str, CheckText]).validate_python(yaml.safe_load(text))


@dataclass(frozen=True)
class Check:
    """A mistake that a record can show."""

    name: str
    predicate: Predicate
    words: CheckText

    @property
    def condition(self) -> str:
        """The condition of the fault in words: the docstring of the predicate."""
        return " ".join((inspect.getdoc(self.predicate) or "").split())

    def lacking(self, record: AuditRecord) -> list[str]:
        """Return the fields that the check needs but the record lacks."""
        return [need for need in self.words.needs if not record.fields & set(need.split(" or "))]


class Report(NamedTuple):
    """The findings of an audit, and the checks that could not be applied."""

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
    silences = {check.name: check.words.silences for check in checks}
    judged = 0
    for check in checks:
        lacking = check.lacking(record)
        if lacking:
            # The report names one missing field; of alternatives, the first is the usual one.
            unjudged.setdefault(lacking[0].partition(" or ")[0], []).append(check.name)
            continue
        fault = None if check.name in silent else check.predicate(record)
        if isinstance(fault, MissingField):
            unjudged.setdefault(fault.field, []).append(check.name)
            continue
        judged += 1
        if fault is not None:
            findings.append(_finding(check, fault, record.header.framework))
            silent |= _consequences(check.name, silences)
    return Report(findings, unjudged, judged)


def _consequences(name: str, silences: Mapping[str, Sequence[str]]) -> set[str]:
    """Return the checks that a finding silences, directly or through another check."""
    consequences = set[str]()
    names = [*silences[name]]
    while names:
        consequence = names.pop()
        if consequence not in consequences:
            consequences.add(consequence)
            names += silences.get(consequence, ())
    return consequences


def _finding(check: Check, fault: Fault, framework: str) -> Finding:
    words = check.words
    sentence = f"{fault.sentence}; {words.convention}" if words.convention else fault.sentence
    step = fault.step + 1  # a record counts from 0, people from 1
    evidence = {"step": step, **fault.evidence}
    # The reader needs one remedy: the framework's own, or else the general one.
    remedy = str(getattr(words, framework, "")) if framework in FRAMEWORKS else ""
    advice = "" if remedy else words.any
    return Finding(check.name, step, words.severity, sentence, remedy, advice, evidence)
