"""A finding as it is shown and written down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

Severity = Literal["note", "warning", "severe"]
STREAM = "findings.jsonl"


@dataclass(frozen=True)
class Finding:
    """One thing that goes wrong."""

    id: str
    step: int
    severity: Severity
    sentence: str
    """With the numbers."""
    remedy: str = ""
    """A line for the config; empty if the config has all of them already."""
    advice: str = ""
    """What no config line can do."""
    evidence: Mapping[str, int | float] = field(default_factory=dict)
    """The step; the group, completion and token that show it, if there are any; metrics by name."""

    def __str__(self) -> str:
        remedies = " or ".join(r for r in (self.remedy, self.advice) if r)
        return f"{self.sentence}. Try: {remedies}" if remedies else self.sentence

    def record(self) -> dict[str, Any]:
        """As a line of `findings.jsonl`."""
        return {**vars(self), "evidence": dict(self.evidence)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Finding | None:
        """The finding of a line, without fields that are unknown here; None if the line is damaged."""
        known = {k: v for k, v in record.items() if k in cls.__dataclass_fields__}
        try:
            return READ_FINDING.validate_python(known)
        except ValidationError:
            return None


READ_FINDING = TypeAdapter(Finding)
