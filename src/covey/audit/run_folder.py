"""A run of another framework as a run folder of covey, which `covey ui` and `covey report` read.

The folder holds what pages show: metrics, findings, completions with their tokens, settings. It has no model:
nothing of it can be continued.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from covey.audit.as_log import arrays_of, by_step, lacking, log_of, metrics_of
from covey.audit.check import apply
from covey.audit.course import course_of
from covey.audit.record import FORMAT, AuditRecord
from covey.audit.recorder import tokenizer_file
from covey.audit.sources import LOSSES, is_foreign, open_run
from covey.audit.table import CHECKS
from covey.insight.findings.finding import Finding
from covey.insight.pages.records import Runs
from covey.runs.folder import RESULT
from covey.runs.rollouts import packed, rollout_file
from covey.system.integrity import sealed, sealed_line, sealed_text
from covey_verify.errors import ConfigError


@contextmanager
def readable(path: Path) -> Iterator[Path]:
    """Yield a folder with covey's runs: ``path`` itself, or a temporary one with what other frameworks wrote.

    Raises as ``open_run``.
    """
    found = _foreign_runs(path)
    if not found:
        yield path
        return
    with TemporaryDirectory(prefix="covey-") as place:
        for name, run in found.items():
            write_run(open_run(run), run, Path(place) / name)
        yield Path(place) / next(iter(found)) if len(found) == 1 else Path(place)


def _foreign_runs(path: Path) -> dict[str, Path]:
    """Return name -> run of the runs of other frameworks in a place; none if it has runs of covey."""
    if path.is_file():
        return {path.name.partition(".")[0]: path}
    if not is_foreign(path) or Runs(path).folders():
        return {}
    records = [
        file for file in sorted(path.glob("*.jsonl")) if _is_record(file) and not file.name.endswith(LOSSES)
    ]
    if records:
        return {file.name.partition(".")[0]: file for file in records}
    try:
        open_run(path)
    except ConfigError:  # an empty folder, where runs of covey may begin
        return {}
    return {path.resolve().name: path}


def _is_record(file: Path) -> bool:
    with file.open("rb") as opened:
        return f'"{FORMAT}"'.encode() in opened.read(200)


def write_run(record: AuditRecord, source: Path, folder: Path) -> None:
    """Write a record as a run folder. ``source``: where it was read; its tokenizer may lie next to it."""
    (folder / "rollouts").mkdir(parents=True)
    settings = {**record.header.settings, **_own_settings(record)}
    (folder / "config.yaml").write_text(sealed_text(json.dumps(settings, indent=1) + "\n"))
    metrics = [{**m, "step": int(m["step"])} for m in metrics_of(record)]
    (folder / "metrics.jsonl").write_text("".join(sealed_line(m) for m in metrics))
    for step in by_step(record):
        _write_step(record, folder, step)
    (folder / "findings.jsonl").write_text("".join(map(sealed_line, _findings(record))))
    if tokenizer_file(source).is_file():
        (folder / "final").mkdir()
        shutil.copyfile(tokenizer_file(source), folder / "final" / "tokenizer.json")
    said = f"{source}, as it was when this page was made: {len(record.updates)} updates, "
    said += f"{len(record.samples)} completions. {lacking(record)}"
    (folder / RESULT).write_text(sealed({"remark": said.strip()}))


def _own_settings(record: AuditRecord) -> dict[str, Any]:
    """Return what every page names of a run: by what it was trained, which model, how many steps."""
    header = record.header
    steps = record.number("max_steps", 0)
    return {
        "method": f"{header.framework or 'another trainer'} {header.framework_version}".strip(),
        "model": record.setting("model", ""),
        "train": {"steps": int(steps)} if steps > 0 else {},
    }


def _write_step(record: AuditRecord, folder: Path, step: int) -> None:
    path = rollout_file(folder, step)
    log = log_of(path, record, by_step(record)[step])
    content = packed(**arrays_of(record, log))
    path.with_suffix(".npz").write_bytes(content)
    facts = {"step": step, "rows": len(log.rows), "arrays": hashlib.sha256(content).hexdigest()}
    facts |= {"greedy_reward": None, "lacks": lacking(record)}
    path.write_text("".join(sealed_line({**row, **facts}) for row in log.rows))


def _findings(record: AuditRecord) -> Iterator[dict[str, Any]]:
    """Yield the audit's findings and those on the metrics, whose evidence is where the pages have it."""
    report = apply(CHECKS, record)
    places = _places(record)
    for finding in (*report.findings, *course_of(record)):
        own = finding.record()
        step, completion = own["evidence"].get("step"), own["evidence"].get("completion")
        found = places.get((step, completion)) if completion is not None else None
        if found is not None:
            own["evidence"] |= found
        yield own
    said = f"{report.judged} of {len(CHECKS)} checks apply"
    said += f"; the others need {', '.join(report.unjudged)}" if report.unjudged else ""
    yield Finding("audit", 0, "note", said).record()


def _places(record: AuditRecord) -> dict[tuple[int, int], dict[str, int]]:
    """Return (step, completion) as findings have them -> step, group and completion as pages have them."""
    # A completion's place on the pages, by its place in the record.
    of_sample: dict[tuple[int, int], dict[str, int]] = {}
    found: dict[tuple[int, int], dict[str, int]] = {}
    for step, rollouts in by_step(record).items():
        for row in log_of(Path(), record, rollouts).rows:
            place = {"step": step, "group": row["group"], "completion": row["sample"]}
            of_sample[row["rollout"], row["place"]] = place
            found.setdefault((step, row["place"]), place)
    # A finding on an update has the update's step, which may come after that of the rollout.
    for use in reversed(record.uses):
        found[use.update.step, use.row.completion] = of_sample[use.row.rollout, use.row.completion]
    return found
