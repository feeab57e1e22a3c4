"""A finding: what is shown and logged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from covey.system.notebook import result_html

Severity = Literal["note", "warning", "severe"]
STREAM = "findings.jsonl"


@dataclass(frozen=True)
class Finding:
    """One problem of a run."""

    id: str
    step: int
    severity: Severity
    sentence: str
    """The problem in a sentence, with its numbers."""
    remedy: str = ""
    """A line for the config; empty if the config has all remedies already."""
    advice: str = ""
    """Advice beyond config lines."""
    evidence: Mapping[str, int | float] = field(default_factory=dict)
    """The step; the group, completion and token that show the problem, if any; metrics by name."""

    def __str__(self) -> str:
        remedies = " or ".join(r for r in (self.remedy, self.advice) if r)
        return f"{self.sentence}. Try: {remedies}" if remedies else self.sentence

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the sentence, and what helps."""
        return result_html([f"step {self.step}, {self.severity}: {self}"])

    def record(self) -> dict[str, Any]:
        """Return the finding as a record for `findings.jsonl`."""
        return {**vars(self), "evidence": dict(self.evidence)}

    @classmethod
    def from_record(cls, record: Mapping[str, object]) -> Finding | None:
        """Return the finding of a record, ignoring unknown fields; None if the record is damaged."""
        fields = {k: v for k, v in record.items() if k in cls.__dataclass_fields__}
        try:
            return READ_FINDING.validate_python(fields)
        except ValidationError:
            return None


READ_FINDING = TypeAdapter(Finding)


class Findings(list[Finding]):
    """The findings of a run, which a notebook shows as lines."""

    def _repr_html_(self) -> str:
        return result_html([f"step {f.step}, {f.severity}: {f}" for f in self] or ["nothing stands out"])
