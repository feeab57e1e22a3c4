"""What was found in a recorded run."""

from __future__ import annotations

from pathlib import Path

from covey.errors import ConfigError
from covey.insight.findings import Finding, Setting, settings_of, unknown
from covey.insight.rules import explain
from covey.runs.folder import read_stream
from covey.runs.reader import last_stage, load_recorded, read_findings, read_verdict


def explain_run(folder: Path) -> tuple[Path, str, list[Finding]]:
    """The last stage of a run, its verdict if it has ended, and its findings.

    Of a run that wrote none, those that its records give.
    """
    stage = last_stage(folder)
    if recorded := read_findings(stage):
        return stage, read_verdict(stage), [Finding.from_record(r) for r in recorded]
    setting: Setting = unknown
    unread: list[Finding] = []
    try:
        setting = settings_of(load_recorded(stage))
    except ConfigError as error:
        said = f"the config cannot be read, so remedies may name what is set already: {error}"
        unread = [Finding("unread_config", 0, "note", said)]
    metrics, evals = (read_stream(stage, f"{name}.jsonl") for name in ("metrics", "evals"))
    return stage, read_verdict(stage), [*explain(metrics, evals, setting), *unread]
