"""The JSON that the pages show of run folders: runs, curves, steps and groups, also live."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar, TypeVarTuple

from covey.config.rows import flatten
from covey.errors import CheckpointError
from covey.insight.conclusion import recorded_conclusion
from covey.insight.findings.finding import Finding
from covey.insight.findings.watch import explain_run
from covey.insight.metric_table import hints
from covey.insight.pages.settings import nearest_preset, recorded_values, setup_but_seed, value_text
from covey.insight.pages.thinning import Record, ThinnedCurve
from covey.runs.folder import ended_otherwise, stream_record
from covey.runs.reader import (
    read_ending,
    read_environment,
    read_remark,
    recorded_yaml,
    seconds_of,
    stages_in,
)
from covey.runs.rollbacks import Rollback, read_rollbacks
from covey.runs.rollouts import recorded_steps, rollout_file
from covey.runs.state import host_elsewhere, run_state
from covey.runs.tags import read_tags
from covey.system.opening import open_below, stream_bytes
from covey.system.text import duration
from covey_verify.errors import ConfigError, CoveyError

T = TypeVar("T")
Given = TypeVarTuple("Given")
DEEPEST = 4
"""Depth of folders that are searched for runs."""
PAGE_STREAMS = ("metrics", "timings", "evals", "events", "findings")
COURSE = 80
"""Number of points of the small curve in the list of runs."""
CURVES = ("metrics", "timings")
"""Streams with a record for each step."""
LISTED = 4096
"""Number of runs whose facts are kept between two looks at the list."""
MEASURED = (*CURVES, "evals")
"""Streams whose names are metrics."""


class Runs:
    """The runs below a folder, by the names that their addresses use."""

    def __init__(self, root: Path | None, source: Path | None = None) -> None:
        self.root = root and root.resolve()
        self.source = source and source.resolve()
        """The path that the folder is a copy of; a copy goes when the pages end, so its own is not shown."""
        self.writable = False
        """Whether the pages offer tags and the trash."""

    def folders(self) -> dict[str, Path]:
        """Return name -> folder, newest first; the stages of a pipeline are runs of their own."""
        if self.root is None:
            return {}
        base = self.root.parent if (self.root / "config.yaml").is_file() else self.root
        newest = sorted(self._below(self.root, DEEPEST), key=_time_of_change, reverse=True)
        return {folder.relative_to(base).as_posix(): folder for folder in newest}

    def folder(self, name: str) -> Path:
        """Return the folder of a run. Raises ConfigError."""
        # A name from the address is looked up, never joined to a path: it cannot lead out of the root.
        folder = self.folders().get(name)
        if folder is None:
            raise ConfigError(f"{name}: no run of that name in {self.root}")
        return folder

    def page(self, name: str) -> Record:
        """Return the page of a run, with the names of the stages of its pipeline. Raises ConfigError."""
        folder = self.folder(name)
        stages = stages_in(folder.parent) if folder.name.partition("-")[0].isdecimal() else []
        names = {path: run for run, path in self.folders().items()}
        page = run_page(name, folder) | {"stages": [names[stage] for stage in stages if stage in names]}
        return page | ({"folder": str(self.source)} if self.source else {})

    def _below(self, folder: Path, depth: int) -> Iterator[Path]:
        with suppress(PermissionError):  # somebody else's
            if (folder / "config.yaml").is_file():
                yield folder
            elif depth:
                for child in folder.iterdir():
                    if child.is_dir() and not child.is_symlink() and not child.name.startswith("."):
                        yield from self._below(child, depth - 1)


def _time_of_change(folder: Path) -> float:
    return max(p.stat().st_mtime for p in (folder / "config.yaml", folder / "metrics.jsonl") if p.exists())


@dataclass
class Tail:
    """A reader of a stream from a byte onwards; it leaves a half-written last line for the next read."""

    path: Path
    at: int = 0
    tokens: float = 0.0
    """Tokens that were trained on by the records read so far."""
    unreadable: int = 0

    def read(self) -> list[Record]:
        """Return the new records. Raises EOFError if the file was truncated, for example by a resume."""
        if not self.path.exists():
            return []
        with open_below(self.path.parent, self.path.name, stream_bytes()) as file:
            if file.seek(0, os.SEEK_END) < self.at:
                raise EOFError(self.path)
            file.seek(self.at)
            complete = file.read().rpartition(b"\n")[0]
        self.at += len(complete) + 1 if complete else 0
        # A resume blanks lines.
        records = [stream_record(line) for line in complete.split(b"\n") if line.strip()]
        self.unreadable += records.count(None)
        return [
            record | _thirds(record) | self._trained_tokens(record)
            for record in records
            if record is not None
        ]

    def _trained_tokens(self, record: Mapping[str, object]) -> Record:
        """Return the tokens that were trained on by the end of a step, from its times; empty if unknown."""
        seconds, rate = (record.get(f"{name}/update") for name in ("seconds", "tokens_per_second"))
        if not isinstance(seconds, float | int) or not isinstance(rate, float | int):
            return {}
        self.tokens += seconds * rate
        return {"tokens": round(self.tokens)}


def _thirds(record: Mapping[str, object]) -> Record:
    """Return a curriculum's ten buckets of pass rates as three, named as the buckets are."""
    buckets = [v for k, v in record.items() if k.startswith("difficulty/pass_rate")]
    if len(buckets) != 10 or not all(isinstance(v, float | int) for v in buckets):
        return {}
    parts = {"0_0.2": buckets[:2], "0.2_0.8": buckets[2:8], "0.8_1": buckets[8:]}
    return {f"difficulty/pass_rate_{name}": sum(part) for name, part in parts.items()}


def tails(folder: Path, at: Mapping[str, int] | None = None) -> dict[str, Tail]:
    """Return readers of all streams of a run, from these bytes and this number of tokens on."""
    at = at or {}
    tokens = at.get("tokens", 0)
    return {name: Tail(folder / f"{name}.jsonl", at.get(name, 0), tokens) for name in PAGE_STREAMS}


def run_conclusion(folder: Path, evals: Sequence[Record], seconds: float) -> Record | None:
    """Return the conclusion on a run as JSON."""
    conclusion = recorded_conclusion(folder, evals, seconds)
    return vars(conclusion) if conclusion else None


def run_list(runs: Runs) -> Record:
    """Return the first page: a row for every run, and hints on what they show."""
    rows = [_row(name, folder) for name, folder in runs.folders().items()]
    return {"runs": rows, "hints": hints(("greedy", "elapsed"))}


def _row(name: str, folder: Path) -> Record:
    state = run_state(folder)
    row: Record = {"run": name, "state": state, "changed": _time_of_change(folder), "model": ""}
    row |= {"tags": read_tags(folder), "ended": _ending(folder, state), "elsewhere": host_elsewhere(folder)}
    try:
        return row | _details(folder)
    except CoveyError as error:
        return row | {"error": str(error)}


def _ending(folder: Path, state: str) -> str:
    """Return why a run ended early; empty for one that trains again, whose folder still has the last end."""
    return read_ending(folder) if state in ("stopped", "interrupted") else ""


def _details(folder: Path) -> Record:
    """Return the facts of a run besides its state. Raises CoveyError if its files are damaged."""
    settings = _settings(folder, _time_of(folder / "config.yaml"))
    if not isinstance(settings.get("train"), Mapping) or "method" not in settings:
        raise ConfigError("its config.yaml does not belong to a run")
    paths = (folder / name for name in ("metrics.jsonl", "evals.jsonl", "timings.jsonl", "result.json"))
    streams = tuple((path.name, path.stat().st_size if path.exists() else 0) for path in paths)
    return _facts(folder, streams) | {
        "method": settings["method"],
        "algorithm": nearest_preset(settings) if settings["method"] == "rl" else "",
        "model": str(settings.get("model")),
        "seed": settings.get("seed"),
        "setup": _setup(folder, *(_time_of(folder / name) for name in ("config.yaml", "env.json"))),
        "steps": 0 if settings["method"] == "filter" else settings["train"].get("steps"),
    }


@lru_cache(maxsize=LISTED)
def _settings(folder: Path, _changed: int) -> Mapping[str, Any]:
    """Return a run's recorded config, cached until it changes: a list may have hundreds of runs."""
    return recorded_yaml(folder)


def _time_of(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


@lru_cache(maxsize=LISTED)
def _setup(folder: Path, changed: int, _environment_changed: int) -> str:
    """Return what a run has in common with runs of other seeds; empty if that cannot be read."""
    try:
        return setup_but_seed(_settings(folder, changed), folder)
    except CoveyError:
        return ""


@lru_cache(maxsize=LISTED)
def _facts(folder: Path, _sizes: tuple[tuple[str, int], ...]) -> Record:
    """Return the facts of a row that come from the streams, read again only when these have grown."""
    metrics, evals, timings = (
        Tail(folder / f"{name}.jsonl").read() for name in ("metrics", "evals", "timings")
    )
    course = [m.get("reward/mean", m.get("loss")) for m in metrics]
    stride = max(1, -(-len(course) // COURSE))
    return {
        "done": metrics[-1]["step"] if metrics else 0,
        "course": course[::stride],
        "greedy": [e.get("greedy") for e in evals],
        "seconds": seconds_of(folder, timings),
        "conclusion": run_conclusion(folder, evals, seconds_of(folder, timings)),
    }


class RunStreams:
    """The content of a run's streams; each byte is read once, however often its page is opened."""

    def __init__(self, folder: Path) -> None:
        # Requests run in threads, and two of them may open the same page.
        self.folder = folder
        self.busy = Lock()
        self.forget()

    def forget(self) -> None:
        """Start again at the first byte."""
        self.tails = tails(self.folder)
        self.curves = {name: ThinnedCurve() for name in CURVES}
        self.lists: dict[str, list[Record]] = {name: [] for name in PAGE_STREAMS if name not in CURVES}
        self.spent = defaultdict[str, float](float)
        """Phase (`seconds/rollout`, `tokens/rollout`) -> total of all steps."""
        self.refused: dict[str, str] = {}
        """Stream -> why it is not read: it is a link, a pipe, or too large."""

    def streams(self) -> dict[str, list[Record]]:
        """Return all streams as they are now, the long ones thinned."""
        with self.busy:
            try:
                self._follow()
            except EOFError:  # a resume has taken records back
                self.forget()
                self._follow()
            curves = {name: curve.records() for name, curve in self.curves.items()}
            return {**curves, **{name: list(records) for name, records in self.lists.items()}}

    def _follow(self) -> None:
        for name, tail in self.tails.items():
            try:
                new = tail.read()
            except CheckpointError as error:
                self.refused[name] = str(error)
                continue
            self.refused.pop(name, None)
            if name in self.curves:
                self.curves[name].add(record for record in new if "step" in record)
                self._count(new)
            else:
                self.lists[name] += new

    def _count(self, records: Iterable[Record]) -> None:
        for record in records:
            for name, value in record.items():
                kind, _, phase = name.partition("/")
                if kind == "seconds" and isinstance(value, float | int):
                    rate = record.get(f"tokens_per_second/{phase}")
                    self.spent[name] += value
                    self.spent[f"tokens/{phase}"] += value * rate if isinstance(rate, float | int) else 0


@lru_cache(maxsize=16)
def shared_streams(folder: Path) -> RunStreams:
    """Return the shared reading of a run's folder."""
    return RunStreams(folder)


@lru_cache(maxsize=64)
def _remarks(folder: Path, _sizes: tuple[int, ...]) -> list[Finding]:
    """Return findings from the records of a run that logged none; made again only when these have grown."""
    return explain_run(folder).findings


def run_page(name: str, folder: Path) -> Record:
    """Return the page of a run: its facts, curves and findings; ``notes`` say what of it is damaged."""
    run = shared_streams(folder)
    records = run.streams()
    notes = _notes(run)
    notes += [f"step {a.step}: {a}" for a in _unless_damaged(notes, list[Rollback](), read_rollbacks, folder)]
    settings = _unless_damaged(notes, list[Record](), recorded_values, folder)
    environment = _unless_damaged(notes, None, read_environment, folder)
    seconds = _unless_damaged(notes, 0.0, seconds_of, folder, records["timings"])
    conclusion = _unless_damaged(notes, None, run_conclusion, folder, records["evals"], seconds)
    state = run_state(folder)
    notes.append(_ending(folder, state))
    notes.append(_unless_damaged(notes, "", read_remark, folder))
    positions = {kind: tail.at for kind, tail in run.tails.items()}
    remarks: list[Finding] = []
    if not records["findings"]:
        remarks = _unless_damaged(notes, remarks, _remarks, folder, tuple(positions.values()))
    return {
        "run": name,
        "folder": str(folder),
        "state": state,
        "settings": settings,
        "environment": [(key, value_text(value)) for key, value in flatten(environment or {})],
        "spent": dict(run.spent),
        "conclusion": conclusion,
        "duration": duration(seconds) if seconds else "",
        "remarks": [vars(remark) for remark in remarks],
        "notes": list(dict.fromkeys(note for note in notes if note)),
        "at": {**positions, "tokens": round(run.tails["timings"].tokens)},
        **news(records),
        "logged": recorded_steps(folder),
    }


def _notes(run: RunStreams) -> list[str]:
    """Return why streams, or lines of them, are not read, and whether a stream ends before its record."""
    tails = run.tails.values()
    notes = [*run.refused.values()]
    for tail in tails:
        if tail.unreadable:
            lines = "1 line" if tail.unreadable == 1 else f"{tail.unreadable} lines"
            notes.append(f"{tail.path}: {lines} cannot be read")
    with suppress(CoveyError):  # of a damaged result, or of what was refused
        notes += [ended_otherwise(run.folder, tail.path.name) for tail in tails]
    return notes


def _unless_damaged(notes: list[str], otherwise: T, read: Callable[[*Given], T], *arguments: *Given) -> T:
    """Return what ``read`` returns; if a file is damaged, note it and return ``otherwise``."""
    try:
        return read(*arguments)
    except CoveyError as error:
        notes.append(str(error))
        return otherwise


def news(streams: Mapping[str, list[Record]]) -> Record:
    """Return records for the page, with a hint on each metric of them.

    Evaluations come without the outcome and the hash of every problem.
    """
    names = {name for stream in MEASURED for record in streams[stream] for name in record}
    return {**streams, "evals": _means(streams["evals"]), "hints": hints(names)}


def _means(evals: Iterable[Record]) -> list[Record]:
    return [{k: v for k, v in e.items() if k not in ("outcome", "basis")} for e in evals]


def run_metrics(name: str, folder: Path) -> Record:
    """Return all records of a run's metrics, times and evaluations, for a download."""
    streams = {stream: tail.read() for stream, tail in tails(folder).items() if stream in MEASURED}
    return {"run": name, **streams, "evals": _means(streams["evals"])}


def newly_logged(folder: Path, metrics: Sequence[Record]) -> list[int]:
    """Of the steps that have just ended, return those with logged completions."""
    steps = (int(record["step"]) for record in metrics if "step" in record)
    return [step for step in steps if rollout_file(folder, step).is_file()]
