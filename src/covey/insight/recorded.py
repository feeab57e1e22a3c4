"""What stands out in a recorded run."""

from __future__ import annotations

from pathlib import Path

from covey.errors import ConfigError
from covey.insight.explain import Remark, Setting, explain, settings_of, unknown
from covey.runs.folder import read_stream
from covey.runs.reader import last_stage, load_recorded


def explain_run(folder: Path) -> tuple[Path, list[Remark]]:
    """The last stage of a run, and what stands out in its metrics."""
    stage = last_stage(folder)
    setting: Setting = unknown
    unread: list[Remark] = []
    try:
        setting = settings_of(load_recorded(stage))
    except ConfigError as error:
        unread = [Remark(f"the config cannot be read, so advice may name what is set already: {error}", "")]
    metrics, evals = (read_stream(stage, f"{name}.jsonl") for name in ("metrics", "evals"))
    return stage, [*explain(metrics, evals, setting), *unread]
