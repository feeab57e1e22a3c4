"""`covey report`: write the page of a run, or of a pipeline's stages, as one file that asks nobody."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from covey.insight.pages.document import address, document, rounded
from covey.insight.pages.records import Record, group_of, run_page, step_of
from covey.insight.pages.tokens import tokens_of
from covey.runs.atomic import write_file
from covey.runs.estimates import Evaluation
from covey.runs.folder import read_numbers, read_stream
from covey.runs.reader import last_stage, recorded_settings, stages_in
from covey.runs.rollouts import RolloutLog, read_rollouts
from covey.types import VERSION
from covey_verify.errors import ConfigError

ROOM = 1_200_000
"""Characters of a report for completions and their tokens, of all stages together."""
GROUPS = 48
"""Most groups that the page of a step lists."""
TEXTS = 100_000
"""Characters of a group's completions, beyond which only its best and its worst one are in the report."""
DIGITS = 6
"""Significant digits of a number in a report."""
Place = tuple[int, int, int]
"""Step, group and completion; -1 for none."""
REFUSAL = "This report does not hold that page. `covey ui` shows it from the run's folder."


def write_report(run: Path, output: Path) -> None:
    """Write the report of a run, or of all stages of a pipeline.

    Raises ConfigError without a run, and CheckpointError if a record of it is damaged.
    """
    stages = [run] if (run / "config.yaml").exists() else stages_in(run) or [last_stage(run)]
    if output.is_dir() or not output.parent.is_dir():
        raise ConfigError(f"--output {output}: name a file in a folder that exists")
    name, answers = run.resolve().name, dict[str, object]()
    for stage in stages:
        _refuse_damage(stage)
        held = Held(stage, stage.resolve().name, ROOM // len(stages))
        answers |= held.answers()
    answers["report?"] = {"name": name, "runs": [stage.resolve().name for stage in stages]}
    modules = ("curves", "step", "tokens", "run", "routes", "report")
    write_file(output, document(name, modules, answers, REFUSAL, plots=True))


def _refuse_damage(stage: Path) -> None:
    """Raise CheckpointError for a damaged record; the page of a run shows what is left of it instead."""
    recorded_settings(stage)
    for name in ("metrics.jsonl", "evals.jsonl", "timings.jsonl"):
        read_numbers(stage, name)
    for record in read_stream(stage, "evals.jsonl"):
        Evaluation.from_record(record)


class Held:
    """The pages of a run that its report has: all of the run's own, and of its completions what has room."""

    def __init__(self, folder: Path, run: str, room: int) -> None:
        self.folder, self.run, self.room, self.full = folder, run, room, False
        self.pages: dict[str, Record] = {}
        """Address -> page."""
        self.logs: dict[int, RolloutLog] = {}
        self.groups: dict[int, list[int]] = {}
        """Step -> its groups, the most telling first."""
        self.samples: dict[tuple[int, int], list[int]] = {}
        """Step and group -> its completions that are held, the best and the worst first."""

    def answers(self) -> Mapping[str, object]:
        """Return address -> page."""
        page = run_page(self.run, self.folder)
        logged = page["logged"]
        if logged:
            self._collect(logged, list(_evidence(page)))
        for known in self.pages.values():
            if "groups" in known:
                known["logged"] = sorted(self.logs)
            elif "completions" in known:
                step = known["step"]
                known["order"] = [group for group in self.groups[step] if (step, group) in self.samples]
        page |= {"logged": sorted(self.logs), "report": self._extent(len(logged))}
        return {**self.pages, address("run", {"run": self.run}): rounded(page, DIGITS)}

    def _extent(self, logged: int) -> str:
        """Say what the report has of a run's completions."""
        said = f"A report of covey {VERSION}: it holds everything that it shows, and loads nothing."
        if not logged:
            return said
        read = sum("pieces" in page for page in self.pages.values())
        return (
            f"{said} Of {logged} steps with completions it has {len(self.logs)}, with {len(self.samples)} of "
            f"their groups and {read} completions token by token. `covey ui` shows all from the run's folder."
        )

    def _collect(self, logged: Sequence[int], evidence: Sequence[Place]) -> None:
        """Add the first, the last and the middle step, those of the evidence, and their groups by turns."""
        middle = logged[len(logged) // 2]
        for step in dict.fromkeys((logged[0], logged[-1], middle, *(step for step, *_ in evidence))):
            if step in logged:
                self._add_step(step, must=step in (logged[0], logged[-1]))
        for step, group, sample in evidence:
            if step in self.logs and group in self.groups[step] and self._add_group(step, group):
                self._add_tokens(step, group, [s for s in self.samples[step, group] if s == sample])
        for rank in range(max(map(len, self.groups.values()))):
            for step, groups in self.groups.items():
                if rank < len(groups) and self._add_group(step, groups[rank], must=not rank):
                    self._add_tokens(step, groups[rank], self.samples[step, groups[rank]][:2])
        for place, samples in self.samples.items():
            self._add_tokens(*place, samples)

    def _add_step(self, step: int, must: bool) -> None:
        log = read_rollouts(self.folder, step)
        page = step_of(self.folder, step, log)
        order = [group["group"] for group in page["groups"]]
        if self._add("step", {"step": step}, page | {"groups": page["groups"][:GROUPS]}, must):
            self.logs[step], self.groups[step] = log, order

    def _add_group(self, step: int, group: int, must: bool = False) -> bool:
        """Add the page of a group. Returns whether it is held."""
        if (step, group) in self.samples or (self.full and not must):
            return (step, group) in self.samples
        page = group_of(self.folder, step, self.logs[step], group)
        known = sorted(page["completions"], key=lambda c: math.inf if c["reward"] is None else -c["reward"])
        scored = [c for c in known if c["reward"] is not None]
        known = [*scored[:1], *scored[:0:-1], *known[len(scored) :]]
        if sum(len(c["completion"]) for c in known) > TEXTS:
            known = known[:2]
        samples = [c["sample"] for c in known]
        page["completions"] = [c for c in page["completions"] if c["sample"] in samples]
        held = self._add("group", {"step": step, "group": group}, page, must)
        if held:
            self.samples[step, group] = samples
        return held

    def _add_tokens(self, step: int, group: int, samples: Sequence[int]) -> None:
        for sample in samples:
            query = {"step": step, "group": group, "sample": sample}
            if not self.full and address("tokens", {"run": self.run, **query}) not in self.pages:
                self._add("tokens", query, tokens_of(self.folder, self.logs[step], group, sample))

    def _add(self, path: str, query: Mapping[str, object], page: Record, must: bool = False) -> bool:
        """Add a page if there is room for it, or if it must be in. Returns whether it is held."""
        shorter = cast("Record", rounded(page, DIGITS))
        size = len(json.dumps(shorter, separators=(",", ":")))
        self.full = size > self.room
        if self.full and not must:
            return False
        self.room -= size
        self.pages[address(path, {"run": self.run, **query})] = shorter
        return True


def _evidence(page: Record) -> Iterator[Place]:
    """Yield step, group and completion of what the findings of a run's page point to."""
    for finding in page["findings"] or page["remarks"]:
        place = finding.get("evidence")
        known = {"step": finding.get("step"), **(place if isinstance(place, Mapping) else {})}
        step, group, sample = (known.get(name) for name in ("step", "group", "completion"))
        if isinstance(step, int):
            yield step, group if isinstance(group, int) else -1, sample if isinstance(sample, int) else -1
