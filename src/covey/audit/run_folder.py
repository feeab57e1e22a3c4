"""A run of another framework as a run folder of covey, which `covey ui` and `covey report` read.

The folder holds what pages show: metrics, findings, completions with their tokens, settings. It has no model:
nothing of it can be continued.
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
from covey.audit.check import apply
from covey.audit.course import findings_from_metrics
from covey.audit.record import FORMAT, AuditRecord
from covey.audit.recorder import tokenizer_file
from covey.audit.sources import LOSSES, is_foreign, open_run
from covey.audit.table import CHECKS
from covey.insight.findings.finding import Finding
from covey.insight.pages.records import Runs
from covey.runs.atomic import write_file
from covey.runs.folder import RESULT
from covey.runs.owner import name_owner
from covey.runs.rollouts import packed, rollout_file
from covey.system.integrity import sealed, sealed_line, sealed_text
from covey_verify.errors import ConfigError, CoveyError

LOOK = 5.0
"""Least seconds between looks at whether a record has grown."""
QUIET = 600.0
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
    """Look at records until the end, for at most a tenth of the time."""
    pause = LOOK
    while not ended.wait(pause):
        start = monotonic()
        for run in runs:
            # A file that is damaged, or gone, keeps the page that it had.
            with suppress(CoveyError, OSError):
                run.look()
        pause = max(LOOK, 10 * (monotonic() - start))


class ForeignRun:
    """A run of another framework, and the run folder that shows it."""

    def __init__(self, source: Path, folder: Path, follow: bool) -> None:
        self.source, self.folder, self.follow = source, folder, follow
        self._state = (0, 0.0, False)

    def look(self) -> None:
        """Write what is new. Raises as ``open_run``."""
        size, changed = _size_and_time(self.source)
        grows = self.follow and time() - changed < QUIET
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


def write_run(record: AuditRecord, source: Path, folder: Path, grows: bool = False) -> None:
    """Write what a run folder of a record lacks. ``source``: where it was read, with its tokenizer beside it.

    ``grows``: the record is being written, so its last step waits until the next one begins. Lines are
    appended only, for example by a run that trains.
    """
    (folder / "rollouts").mkdir(parents=True, exist_ok=True)
    settings = {**record.header.settings, **_own_settings(record)}
    write_file(folder / "config.yaml", sealed_text(json.dumps(settings, indent=1) + "\n"))
    lines = {name: _written(folder / f"{name}.jsonl") for name in ("metrics", "findings")}
    steps_shown = {line["step"] for line in lines["metrics"]}
    metrics = [{**m, "step": int(m["step"])} for m in metrics_of(record)]
    metrics = [m for m in metrics if m["step"] not in steps_shown]
    if grows:
        steps_updated = {update.step for update in record.updates}
        metrics = [m for m in metrics if m["step"] in steps_updated]
    steps = list(by_step(record))
    for step in steps[:-1] if grows else steps:  # the last one may have updates to come
        if not rollout_file(folder, step).exists():
            _write_step(record, folder, step)
    _append(folder / "metrics.jsonl", metrics)
    written_ids = {line["id"] for line in lines["findings"]}
    _append(folder / "findings.jsonl", [f for f in _findings(record, grows) if f["id"] not in written_ids])
    if tokenizer_file(source).is_file():
        (folder / "final").mkdir(exist_ok=True)
        shutil.copyfile(tokenizer_file(source), folder / "final" / "tokenizer.json")
    _say_whether_it_grows(record, source, folder, grows)


def _written(stream: Path) -> list[dict[str, object]]:
    """Return the lines of a stream that are there already."""
    return [json.loads(line) for line in stream.read_text().splitlines()] if stream.exists() else []


def _append(stream: Path, lines: Iterable[dict[str, Any]]) -> None:
    with stream.open("a") as file:
        file.write("".join(map(sealed_line, lines)))


def _say_whether_it_grows(record: AuditRecord, source: Path, folder: Path, grows: bool) -> None:
    """Name this process as the owner, by which pages follow the folder, or a result."""
    if grows:
        name_owner(folder)
        (folder / RESULT).unlink(missing_ok=True)
        return
    remark = f"{source}, as it was when this page was made: {len(record.updates)} updates, "
    remark += f"{len(record.samples)} completions. {lacking(record)}"
    # Whole at once: pages may read it meanwhile.
    write_file(folder / RESULT, sealed({"remark": remark.strip()}))


def _own_settings(record: AuditRecord) -> dict[str, object]:
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
    # Last, and whole at once: the step counts as written once this file is there.
    write_file(path, "".join(sealed_line({**row, **facts}) for row in log.rows))


def _findings(record: AuditRecord, grows: bool) -> Iterator[dict[str, object]]:
    """Yield the audit's findings and those on the metrics, whose evidence is where the pages have it.

    How many checks apply is known of a record that is complete.
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
        sentence = "this record is still being written; the pages follow it, and more findings may appear"
        yield Finding("audit_follows", 0, "note", sentence).record()
        return
    sentence = f"{report.judged} of {len(CHECKS)} checks apply"
    sentence += f"; the others need {', '.join(report.unjudged)}" if report.unjudged else ""
    yield Finding("audit", 0, "note", sentence).record()


def _places(record: AuditRecord) -> dict[tuple[int, int], dict[str, int]]:
    """Return (step, completion) as findings have them -> step, group and completion as pages have them."""
    # A completion's place on the pages, by its place in the record.
    of_sample: dict[tuple[int, int], dict[str, int]] = {}
    pages: dict[tuple[int, int], dict[str, int]] = {}
    for step, rollouts in by_step(record).items():
        for row in log_of(Path(), record, rollouts).rows:
            page = {"step": step, "group": row["group"], "completion": row["sample"]}
            of_sample[row["rollout"], row["place"]] = page
            pages.setdefault((step, row["place"]), page)
    # A finding on an update has the update's step, which may come after the rollout's step.
    for use in reversed(record.uses):
        pages[use.update.step, use.row.completion] = of_sample[use.row.rollout, use.row.completion]
    return pages
