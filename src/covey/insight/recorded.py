"""What was found in a recorded run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from covey.estimates import Evaluation
from covey.insight.findings import STREAM, Finding, SettingOf, settings_of, unknown
from covey.insight.rules import explain
from covey.insight.verdict import Verdict, judge_run
from covey.runs.folder import read_numbers, read_stream, readable_stream
from covey.runs.reader import last_stage, look_at, read_ending, read_verdict, verdict_record
from covey_verify.errors import ConfigError


def recorded_verdict(stage: Path, evals: Sequence[Mapping[str, Any]], seconds: float) -> Verdict | None:
    """The verdict a run ended with, which has what was measured again; before, from its ``evals``.

    None where there were less than two. Raises CheckpointError where the result is damaged.
    """
    said = verdict_record(stage)
    if said is not None:
        return Verdict(said.get("word", "cannot tell"), str(said.get("sentence", "")))
    if len(evals) < 2:
        return None
    first, last = (Evaluation.from_record(evals[n]) for n in (0, -1))
    return judge_run(first, last, seconds)


def explain_run(folder: Path) -> tuple[Path, str, list[Finding]]:
    """The last stage of a run, its verdict if it has ended or why it ended early, and its findings.

    Of a run that wrote none, those that its records give. What cannot be read is a finding too.
    """
    stage = last_stage(folder)
    said = read_verdict(stage) or read_ending(stage)
    records, lost = readable_stream(stage, STREAM)
    read = [Finding.from_record(r) for r in records]
    found, damaged = [f for f in read if f], lost + read.count(None)
    note = f"{stage / STREAM}: damaged, {damaged} of its lines cannot be read"
    notes = [Finding("unread_findings", 0, "note", note)] if damaged else []
    if found:
        return stage, said, found + notes
    setting: SettingOf = unknown
    try:
        setting = settings_of(look_at(stage))
    except ConfigError as error:
        unread = f"the config cannot be read, so remedies may name what is set already: {error}"
        notes.append(Finding("unread_config", 0, "note", unread))
    metrics, evals = read_numbers(stage, "metrics.jsonl"), read_stream(stage, "evals.jsonl")
    return stage, said, explain(metrics, evals, setting) + notes
