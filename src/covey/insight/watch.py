"""Watching a run: what each step shows is turned into findings, each said once and written down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from covey.estimates import Evaluation
from covey.insight.findings import STREAM, Finding, Seen, SettingOf, find
from covey.insight.rules import RULES
from covey.runs.folder import RunFolder
from covey.types import Group


@dataclass
class Watch:
    """What a run has written down so far, read once and followed.

    All of its memory is in the run's logs: a resume cuts those back, and what follows is the same.
    """

    folder: RunFolder
    setting: SettingOf
    metrics: list[dict[str, Any]] = field(default_factory=list)
    evals: list[Evaluation] = field(default_factory=list)
    said: list[str] | None = None
    """Ids of the findings; None before the first look."""
    _bytes: int = -1

    def after(
        self, step: int, metrics: Mapping[str, float] | None = None, groups: Sequence[Group] = ()
    ) -> list[Finding]:
        """New findings, now that a step (its metrics are logged) or a last evaluation has ended."""
        if self.said is None:
            self.metrics = self.folder.read("metrics.jsonl")
            self.said = [str(f.get("id")) for f in self.folder.read(STREAM)]
        elif metrics is not None:
            self.metrics.append({"step": step, **metrics})
        self._read_evaluations()
        found = find(RULES, Seen(self.metrics, self.evals, self.setting), self.said, step, groups)
        for finding in found:
            self.folder.append(STREAM, finding.record())
            self.said.append(finding.id)
        return found

    def _read_evaluations(self) -> None:
        path = self.folder.path / "evals.jsonl"
        size = path.stat().st_size if path.exists() else 0
        if size != self._bytes:
            records = self.folder.read("evals.jsonl")
            self._bytes, self.evals = size, [Evaluation.from_record(r) for r in records]
