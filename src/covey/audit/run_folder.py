"""Write a run of another framework as a run folder of covey, which `covey ui` and `covey report` read.

The folder holds metrics, findings, completions with their tokens, and settings. It has no model, so the run
cannot be continued.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from time import monotonic, time
from typing import Any

from covey.audit.as_log import arrays_of, by_step, lacking, log_of, metrics_of
from covey.audit.checks.check import apply
from covey.audit.course import findings_from_metrics
from covey.audit.readers.sources import LOSSES, is_foreign, open_run
from covey.audit.record import FORMAT, AuditRecord
from covey.audit.table import CHECKS
from covey.audit.writers.recorder import tokenizer_file
from covey.insight.findings.finding import Finding
from covey.insight.pages.records import Runs
from covey.runs.atomic import write_file
from covey.runs.folder import RESULT
from covey.runs.owner import name_owner
from covey.runs.rollouts import packed, rollout_file
from covey.system.integrity import sealed, sealed_line, sealed_text
from covey_verify.errors import ConfigError, CoveyError

MIN_PAUSE = 5.0
"""Fewest seconds between two checks of whether a record has grown."""
FINISHED_AFTER = 600.0
"""Seconds without a new line after which a run counts as finished."""


@contextmanager
def readable(path: Path, follow: bool = False) -> Iterator[Path]:
    """Yield a folder with covey's runs: ``path`` itself, or a temporary one with what other frameworks wrote.

    ``follow``: the folder grows with records that are still being written. Raises as ``open_run``.
    """
    sources = _foreign_runs(path)
    if not sources:
        yield path
        return
    with TemporaryDirectory(prefix="covey-") as temporary:
        runs = [ForeignRun(source, Path(temporary) / name, follow) for name, source in sources.items()]
        for run in runs:
            run.look()
        ended = Event()
        watcher = Thread(target=_watch, args=(runs, ended), daemon=True)
        if follow:
            watcher.start()
        try:
            yield runs[0].folder if len(runs) == 1 else Path(temporary)
        finally:
            ended.set()
            if follow:
                watcher.join()


def _watch(runs: Sequence[ForeignRun], ended: Event) -> None:
    """Follow records until ``ended``, and spend at most a tenth of the time on it."""
    pause = MIN_PAUSE
    while not ended.wait(pause):
        start = monotonic()
        for run in runs:
            # If the file is damaged or gone, its page stays as it is.
            with suppress(CoveyError, OSError):
                run.look()
        pause = max(MIN_PAUSE, 10 * (monotonic() - start))


class ForeignRun:
    """A run of another framework, and the run folder that shows it."""

    def __init__(self, source: Path, folder: Path, follow: bool) -> None:
        self.source, self.folder, self.follow = source, folder, follow
        self._state = (0, 0.0, False)

    def look(self) -> None:
        """Write the new parts of the run. Raises as ``open_run``."""
        size, changed = _size_and_time(self.source)
        grows = self.follow and time() - changed < FINISHED_AFTER
        state = (size, changed, grows)
        if state == self._state:
            return
        if size < self._state[0]:  # another run under this name
            shutil.rmtree(self.folder)
        write_run(open_run(self.source), self.source, self.folder, grows)
        self._state = state


def _size_and_time(source: Path) -> tuple[int, float]:
    """Return the bytes of a run's files and the time of the last change."""
    files = [source] if source.is_file() else [file for file in source.rglob("*") if file.is_file()]
    stats = [file.stat() for file in files]
    return sum(f.st_size for f in stats), max((f.st_mtime for f in stats), default=0.0)


def _foreign_runs(path: Path) -> dict[str, Path]:
    """Return the runs of other frameworks in a folder by name; none if the folder has runs of covey."""
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


def write_run(record: AuditRecord, source: Path, folder: Path, grows: bool = False) -> None:
    """Write the missing parts of a record's run folder. ``source``: the record's path, next to its tokenizer.

    ``grows``: the record is still being written, so its last step is left out until the next one begins.
    Lines are only appended, so a run that still trains can be followed.
    """
    (folder / "rollouts").mkdir(parents=True, exist_ok=True)
    settings = {**record.header.settings, **_own_settings(record)}
    write_file(folder / "config.yaml", sealed_text(json.dumps(settings, indent=1) + "\n"))
    lines = {name: _written(folder / f"{name}.jsonl") for name in ("metrics", "findings")}
    steps_shown = {line["step"] for line in lines["metrics"]}
    metrics = [{**m, "step": int(m["step"])} for m in metrics_of(record)]
    metrics = [m for m in metrics if m["step"] not in steps_shown]
    if grows:
        steps_updated = {update.step + 1 for update in record.updates}
        metrics = [m for m in metrics if m["step"] in steps_updated]
    steps = list(by_step(record))
    for step in steps[:-1] if grows else steps:  # the last one may have updates to come
        if not rollout_file(folder, step).exists():
            _write_step(record, folder, step)
    _append(folder / "metrics.jsonl", metrics)
    written_ids = {line["id"] for line in lines["findings"]}
    rows = _findings(record, source, grows)
    _append(folder / "findings.jsonl", [row for row in rows if row["id"] not in written_ids])
    if tokenizer_file(source).is_file():
        (folder / "final").mkdir(exist_ok=True)
        shutil.copyfile(tokenizer_file(source), folder / "final" / "tokenizer.json")
    _say_whether_it_grows(record, source, folder, grows)


def _written(stream: Path) -> list[dict[str, object]]:
    """Return the lines that a stream already has."""
    return [json.loads(line) for line in stream.read_text().splitlines()] if stream.exists() else []


def _append(stream: Path, lines: Iterable[dict[str, Any]]) -> None:
    with stream.open("a") as file:
        file.write("".join(map(sealed_line, lines)))


def _say_whether_it_grows(record: AuditRecord, source: Path, folder: Path, grows: bool) -> None:
    """Write this process as the owner, so that pages follow the folder, or write a result."""
    if grows:
        name_owner(folder)
        (folder / RESULT).unlink(missing_ok=True)
        return
    remark = f"{source}, as it was when this page was made: {len(record.updates)} updates, "
    remark += f"{len(record.samples)} completions. {lacking(record)}"
    # The file is replaced as a whole, because pages may be reading it.
    write_file(folder / RESULT, sealed({"remark": remark.strip()}))


def _own_settings(record: AuditRecord) -> dict[str, object]:
    """Return the settings that every page shows: the trainer, the model, the number of steps."""
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
    # This file comes last and as a whole: once it exists, the step counts as written.
    write_file(path, "".join(sealed_line({**row, **facts}) for row in log.rows))


def _findings(record: AuditRecord, source: Path, grows: bool) -> Iterator[dict[str, object]]:
    """Yield the findings of the audit and on the metrics, with evidence that points to places on the pages.

    The number of checks that apply is known only once a record is complete.
    """
    report = apply(CHECKS, record)
    places = _places(record)
    for finding in (*report.findings, *findings_from_metrics(record)):
        fields = finding.record()
        step, completion = fields["evidence"].get("step"), fields["evidence"].get("completion")
        page = places.get((step, completion)) if completion is not None else None
        if page is not None:
            fields["evidence"] |= page
        yield fields
    if grows:
        sentence = f"{source} was still being written when this page was made; the pages follow it"
        yield _note("audit_follows", sentence)
        return
    sentence = f"{report.judged} of {len(CHECKS)} checks apply"
    sentence += f"; covey audit {source} lists the fields that the others need" if report.unjudged else ""
    yield _note("audit", sentence)


def _note(name: str, sentence: str) -> dict[str, object]:
    """Return a note on the whole record: no page shows a step below 0."""
    return Finding(name, -1, "note", sentence).record()


def _places(record: AuditRecord) -> dict[tuple[int, int], dict[str, int]]:
    """Return (step, completion) of a finding -> step, group and completion on the pages."""
    # First from places in the record to places on the pages.
    of_sample: dict[tuple[int, int], dict[str, int]] = {}
    pages: dict[tuple[int, int], dict[str, int]] = {}
    for step, rollouts in by_step(record).items():
        for row in log_of(Path(), record, rollouts).rows:
            page = {"step": step, "group": row["group"], "completion": row["sample"]}
            of_sample[row["rollout"], row["place"]] = page
            pages.setdefault((step, row["place"]), page)
    # A finding on an update has the update's step, which may come after the rollout's step.
    for use in reversed(record.uses):
        pages[use.update.step + 1, use.row.completion] = of_sample[use.row.rollout, use.row.completion]
    return pages
