"""Readers of logged metrics: exports of Weights & Biases, TensorBoard's event files, trackio, JSON lines."""

from __future__ import annotations

import csv
import io
import math
import sqlite3
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from covey.audit.frameworks import framework_of, words_of
from covey.audit.record import FORMAT, VERSION, AuditRecord, Header, Update
from covey.system.opening import RECORD_BYTES, load_json, read_regular, stream_bytes
from covey_verify.errors import DataError

STEPS = ("training/global_step", "global_step", "step", "Step", "_step")
"""Names of the step, best first: W&B's own `_step` counts lines."""
EVENTS = "events.out.tfevents."
RUN = "run_name"
"""The column with the run's name, in a log of several runs."""
Logged = Mapping[str, Any]
"""Metrics by name that were logged together."""


def read_log(path: Path) -> AuditRecord:
    """Read metrics that TRL, verl, OpenRLHF or prime-rl logged, from a file of any known kind.

    Raises DataError if the file is damaged or has none of their metrics.
    """
    kinds = {".csv": _csv, ".db": _trackio, ".json": _json}
    reader = _events if EVENTS in path.name else kinds.get(path.suffix, _json_lines)
    try:
        rows = list(reader(path))
    except (ValueError, KeyError, TypeError, csv.Error, struct.error, sqlite3.Error) as error:
        raise DataError(f"{path}: not a log of metrics, or a damaged one ({error})") from None
    return logged(path, rows)


def logged(path: Path, rows: Sequence[Logged]) -> AuditRecord:
    """Return a record with the metrics of each step; of several runs, the last one.

    Raises DataError if the names are of no known framework.
    """
    runs = list(dict.fromkeys(row.get(RUN) for row in rows))
    names, steps = _by_step(row for row in rows if row.get(RUN) == runs[-1])
    framework = framework_of(names)
    if not framework or not steps:
        present = ", ".join([name for name in names if name and name not in STEPS][:5]) or "no numbers"
        missing = "metrics that TRL, verl, OpenRLHF or prime-rl logs" if steps else f"steps ({STEPS[0]}, ...)"
        raise DataError(f"{path}: not a log of training: {missing} are missing; it has {present}")
    updates = [_update(framework, step, metrics) for step, metrics in sorted(steps.items())]
    header = Header(format=FORMAT, version=VERSION, framework=framework)
    lines = tuple(update for update in updates if update is not None)
    others = [f"{path}: {len(runs)} runs; {runs[-1]}, which logged last, is read"] if len(runs) > 1 else []
    return AuditRecord(header, lines, notes=[*others, f"{path}: metrics only, no completions"])


def _by_step(rows: Iterable[Logged]) -> tuple[list[str], dict[int, dict[str, float]]]:
    """Return the names of all metrics, and the metrics of each numbered step."""
    names = dict[str, None]()  # a dict keeps their order
    steps: dict[int, dict[str, float]] = {}
    for row in rows:
        # verl's file logger has the metrics of a step in an object of their own.
        inner = row["data"] if isinstance(row.get("data"), dict) else {}
        numbers = {name.removeprefix("train/"): _number(value) for name, value in {**row, **inner}.items()}
        values = {name: value for name, value in numbers.items() if value is not None}
        names |= dict.fromkeys(values)
        step = next((values[name] for name in STEPS if name in values), math.nan)
        if math.isfinite(step):
            # Frameworks log after an update and count from 1; a record counts from 0.
            steps.setdefault(int(step) - 1, {}).update(values)
    return list(names), steps


def _update(framework: str, step: int, metrics: dict[str, float]) -> Update | None:
    """Return a step's line; None if it has no metric that covey knows."""
    words = words_of(framework)
    translated = {words.metric(name): value for name, value in metrics.items()}
    if not set(translated) - {None}:
        return None
    return Update(
        kind="update",
        step=step,
        loss=translated.get("loss"),
        grad_norm=translated.get("optimizer/grad_norm"),
        learning_rate=translated.get("optimizer/lr"),
        metrics=dict(metrics),
    )


def _number(value: Any) -> float | None:
    """Return a number, even one written as text; None for anything else."""
    try:
        return None if isinstance(value, bool | dict | list) or value in ("", None) else float(value)
    except (ValueError, TypeError):
        return None


# --- kinds of files -------------------------------------------------------------------------------


def _csv(path: Path) -> Iterator[Logged]:
    """Yield the rows of W&B's exports: a history, or a chart, whose columns begin with the run's name."""
    text = read_regular(path, stream_bytes()).decode("utf-8-sig")
    table = csv.DictReader(io.StringIO(text, newline=""))
    columns = [name for name in table.fieldnames or () if not name.endswith(("__MIN", "__MAX"))]
    runs = {name.rpartition(" - ")[0] for name in columns} - {""}
    if len(runs) > 1:
        raise ValueError(f"{len(runs)} runs, {' and '.join(sorted(runs)[:2])} among them; export one")
    for row in table:
        yield {name.rpartition(" - ")[2]: row[name] for name in columns}


def _json_lines(path: Path) -> Iterator[Logged]:
    for n, line in enumerate(read_regular(path, stream_bytes()).splitlines(), start=1):
        if line.strip():
            yield _object(load_json(line), f"line {n}")


def _json(path: Path) -> Iterator[Logged]:
    """Yield a summary, or a history as a list."""
    value = load_json(read_regular(path, RECORD_BYTES))
    rows = value if isinstance(value, list) else [value]
    yield from (_object(row, f"entry {n}") for n, row in enumerate(rows))


def _object(value: object, where: str) -> Logged:
    if not isinstance(value, dict):
        raise TypeError(f"{where} is not an object")
    return value


def _trackio(path: Path) -> Iterator[Logged]:
    """Yield the lines of all runs in the database of a trackio project, in the order of logging."""
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as base:
        lines = base.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    for name, step, metrics in lines:
        content = metrics.encode() if isinstance(metrics, str) else metrics
        yield {**_object(load_json(content), f"step {step}"), "_step": step, RUN: name}


def _events(path: Path) -> Iterator[Logged]:
    """Yield the scalars of a TensorBoard file: records of (length, checksum, Event, checksum)."""
    data = memoryview(read_regular(path, stream_bytes()))
    at = 0
    while at + 12 <= len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        # The last record of a run that still trains may be incomplete.
        if at + 16 + size > len(data):
            break
        event = dict(_fields(data[at + 12 : at + 12 + size]))
        at += 16 + size
        for _, value in _fields(event.get(5, b"")):
            fields = dict(_fields(value))
            number = fields.get(2) or dict(_fields(fields.get(8, b""))).get(5)
            if number is not None and len(number) == 4:
                yield {bytes(fields[1]).decode(): struct.unpack("<f", number)[0], "_step": event.get(2, 0)}


def _fields(data: Any) -> Iterator[tuple[int, Any]]:
    """Yield (number, value) of a protobuf message: an int, or the bytes of anything else."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        size, at = (_varint(data, at)) if kind == 2 else ({1: 8, 5: 4}[kind], at)
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: Any, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data):
            raise ValueError("it ends within a number")
        value |= (data[at] & 127) << shift
        shift += 7
        at += 1
        if data[at - 1] < 128:
            return value, at
