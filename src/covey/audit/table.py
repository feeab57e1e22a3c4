"""The table of all checks in their order, and the audit of a run with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from covey.audit.checks import (
    advantages,
    corrections,
    data,
    draws,
    exchanges,
    groups,
    logprobs,
    losses,
    magnitudes,
    preferences,
    prompts,
    references,
    rescored,
    returns,
    rewards,
    row_answers,
    samplers,
    steps,
    terms,
    tokens,
    tools,
    updates,
    uses,
    verdicts,
)
from covey.audit.checks.check import Check, Predicate, Report, apply, check_texts
from covey.audit.course import findings_from_metrics
from covey.audit.readers.sources import open_run
from covey.audit.record import AuditRecord
from covey.insight.show import finding_lines

PREDICATES: Mapping[str, Predicate] = {
    **tokens.CHECKS,
    **prompts.CHECKS,
    **tools.CHECKS,
    **logprobs.CHECKS,
    **samplers.CHECKS,
    **references.CHECKS,
    **exchanges.CHECKS,
    **draws.CHECKS,
    **preferences.CHECKS,
    **groups.CHECKS,
    **advantages.CHECKS,
    **magnitudes.CHECKS,
    **uses.CHECKS,
    **rescored.CHECKS,
    **row_answers.CHECKS,
    **verdicts.CHECKS,
    **rewards.CHECKS,
    **data.CHECKS,
    **returns.CHECKS,
    **losses.CHECKS,
    **corrections.CHECKS,
    **terms.CHECKS,
    **updates.CHECKS,
    **steps.CHECKS,
}

CHECKS = tuple(Check(name, PREDICATES[name], text) for name, text in check_texts().items())
"""The most certain ones first: ids and masks are read, then values are computed again, then settings."""


def audit(path: Path) -> tuple[AuditRecord, Report]:
    """Read a run of any framework and apply all checks. Raises DataError if it cannot be read."""
    record = open_run(path)
    return record, apply(CHECKS, record)


def audit_as_json(record: AuditRecord, report: Report) -> dict[str, object]:
    """Return an audit as JSON."""
    return {
        "framework": record.header.framework,
        "updates": len(record.updates),
        "completions": len(record.samples),
        "findings": [finding.record() for finding in report.findings],
        "course": [finding.record() for finding in findings_from_metrics(record)],
        "checks": report.judged,
        "cannot_be_judged_without": report.unjudged,
        "notes": record.notes,
    }


def audit_lines(path: Path, record: AuditRecord, report: Report) -> Iterator[str]:
    """Yield an audit as lines: the run, its faults, and the fields without which checks cannot judge."""
    framework = f"{record.header.framework or 'unknown framework'} {record.header.framework_version}".strip()
    sizes = f"{len(record.updates)} updates, {len(record.samples)} completions"
    yield f"{path} ({framework}): {sizes}; {report.judged} of {len(CHECKS)} checks apply"
    yield from (f"note: {note}" for note in record.notes)
    yield ""
    yield from finding_lines(path, report.findings) if report.findings else ("no mistake found",)
    course = findings_from_metrics(record)
    if course:
        yield ""
        yield "how it went, by its metrics:"
    yield from finding_lines(path, course)
    if report.unjudged:
        yield ""
    for field, names in report.unjudged.items():
        yield f"cannot be judged without {field}: {', '.join(names)}"
