"""The findings of a run: while it trains, each logged once, or from its records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from covey.insight.findings.finding import STREAM, Finding
from covey.insight.findings.rule import find
from covey.insight.findings.settings import SettingOf, settings_of, unknown
from covey.insight.findings.table import RULES, explain
from covey.insight.findings.view import WIDEST, RunView
from covey.runs.estimates import Evaluation
from covey.runs.folder import RunFolder, read_numbers, read_stream, readable_stream
from covey.runs.reader import last_stage, load_settings, read_conclusion, read_ending
from covey.runs.rollbacks import read_rollbacks
from covey.types import Group
from covey_verify.errors import ConfigError


@dataclass
class Watch:
    """The records of a run so far, read from its logs once and then extended step by step.

    All of its state follows from the logs. A resume truncates these, so the same findings follow again.
    """

    folder: RunFolder
    setting: SettingOf
    metrics: list[dict[str, object]] = field(default_factory=list)
    """Records of the first and the last WIDEST steps; no rule reads the others."""
    steps: int = 0
    evals: list[Evaluation] = field(default_factory=list)
    reported: list[str] | None = None
    """Ids of the findings so far; None before the first step."""
    tried: list[str] = field(default_factory=list)
    """Config lines that a run has tried already, if it rolls back because of findings."""
    _bytes: int = -1
    _view: RunView = field(default_factory=lambda: RunView(()))

    def record_findings(
        self, step: int, metrics: Mapping[str, float] | None = None, groups: Sequence[Group] = ()
    ) -> list[Finding]:
        """Make and log new findings after a step, whose metrics are logged, or after the last evaluation."""
        if self.reported is None:
            self.metrics = self.folder.read("metrics.jsonl")
            self.steps = len(self.metrics)
            self.reported = [str(f.get("id")) for f in self.folder.read(STREAM)]
            self.tried = [rollback.line for rollback in read_rollbacks(self.folder.path)]
        elif metrics is not None:
            self.metrics.append({"step": step, **metrics})
            self.steps += 1
        del self.metrics[WIDEST : max(WIDEST, len(self.metrics) - WIDEST)]
        self._read_evaluations()
        self._view = RunView(self.metrics, self.evals, self.setting, steps=self.steps, tried=self.tried)
        findings = find(RULES, self._view, self.reported, step, groups)
        for finding in findings:
            self.folder.append(STREAM, finding.record())
            self.reported.append(finding.id)
        return findings

    def holds(self, finding: Finding) -> bool:
        """Whether the rule of an earlier finding applies after the last step as well."""
        return any(rule.name == finding.id and rule.predicate(self._view) is not None for rule in RULES)

    def _read_evaluations(self) -> None:
        path = self.folder.path / "evals.jsonl"
        size = path.stat().st_size if path.exists() else 0
        if size != self._bytes:
            records = self.folder.read("evals.jsonl")
            self.evals = [Evaluation.from_record(r) for r in records]
            self._bytes = size


class Explanation(NamedTuple):
    """The outcome of a run, and the reasons for it."""

    stage: Path
    """Folder of the last stage."""
    conclusion: str
    """The run's conclusion; without one, the reason why it ended early."""
    findings: list[Finding]


def explain_run(folder: Path) -> Explanation:
    """Explain the last stage of a run.

    If the run logged no findings, they are made from its records. A file that cannot be read gives a finding
    too.
    """
    stage = last_stage(folder)
    outcome = read_conclusion(stage) or read_ending(stage)
    records, lost = readable_stream(stage, STREAM)
    logged = [Finding.from_record(r) for r in records]
    findings = [f for f in logged if f]
    notes = [Finding("rollback", a.step, "note", str(a)) for a in read_rollbacks(stage)]
    damaged = lost + logged.count(None)
    if damaged:
        note = f"{stage / STREAM}: damaged, {damaged} of its lines cannot be read"
        notes.append(Finding("unread_findings", 0, "note", note))
    if findings:
        return Explanation(stage, outcome, findings + notes)
    setting: SettingOf = unknown
    try:
        setting = settings_of(load_settings(stage))
    except ConfigError as error:
        unread = f"the config cannot be read, so remedies may name what is set already: {error}"
        notes.append(Finding("unread_config", 0, "note", unread))
    metrics = read_numbers(stage, "metrics.jsonl")
    evals = read_stream(stage, "evals.jsonl")
    return Explanation(stage, outcome, explain(metrics, evals, setting) + notes)
