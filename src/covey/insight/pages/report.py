"""`covey report`: the page of a run, or of a pipeline's stages, as one file that sends no requests."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from covey.insight.pages.document import address, document
from covey.insight.pages.records import run_page
from covey.insight.pages.steps import group_of, logged_step
from covey.insight.pages.thinning import Record
from covey.insight.pages.tokens import logged_completion
from covey.runs.atomic import write_file
from covey.runs.estimates import Evaluation
from covey.runs.folder import read_numbers, read_stream
from covey.runs.reader import last_stage, recorded_yaml, stages_in
from covey.runs.rollouts import read_rollouts, recorded_steps
from covey.system.text import with_finite_numbers
from covey.types import VERSION
from covey_verify.errors import ConfigError

ROOM = 1_200_000
"""Characters of a report for completions and their tokens, of all stages together that sample."""
GROUPS = 48
"""Most groups that the page of a step lists."""
TEXTS = 100_000
"""Characters of a group's completions, beyond which only its best and its worst one are in the report."""
DIGITS = 6
"""Significant digits of a number in a report."""
REFUSAL = "This report does not hold that page. `covey ui` shows it from the run's folder."
Answer = tuple[str, Record, Record]
"""The kind of page (`step`, `group`, `tokens`), the query besides the run, and the page."""


def write_report(run: Path, output: Path) -> None:
    """Write the report of a run, or of all stages of a pipeline.

    Raises ConfigError without a run, and CheckpointError if a record of it is damaged.
    """
    stages = [run] if (run / "config.yaml").exists() else stages_in(run) or [last_stage(run)]
    if output.is_dir() or not output.parent.is_dir():
        raise ConfigError(f"--output {output}: name a file in a folder that exists")
    name = run.resolve().name
    answers = dict[str, object]()
    room = ROOM // max(1, sum(bool(recorded_steps(stage)) for stage in stages))
    for stage in stages:
        _refuse_damage(stage)
        answers |= _pages(stage, stage.resolve().name, room)
    answers["report?"] = {"name": name, "runs": [stage.resolve().name for stage in stages]}
    modules = ("charts", "bands", "download", "curves", "diff", "step", "tokens", "run", "routes", "report")
    write_file(output, document(name, modules, answers, REFUSAL, plots=True))


def _refuse_damage(stage: Path) -> None:
    """Raise CheckpointError for a damaged record; the page of a run shows what is left of it instead."""
    recorded_yaml(stage)
    for name in ("metrics.jsonl", "timings.jsonl"):
        read_numbers(stage, name)
    for record in read_stream(stage, "evals.jsonl"):
        Evaluation.from_record(record)


def _pages(folder: Path, run: str, room: int) -> dict[str, object]:
    """Return address -> page: the run's own, and as many completions as fit."""
    page = run_page(run, folder)
    pages = dict[str, object]()
    kinds = Counter[str]()
    for is_required, (path, query, content) in _by_importance(folder, page):
        answer = with_finite_numbers(content, DIGITS)
        size = len(json.dumps(answer, separators=(",", ":")))
        if size > room and not is_required:
            break
        room -= size
        pages[address(path, {"run": run, **query})] = answer
        kinds[path] += 1
    summary = f"A report of covey {VERSION}: it holds everything that it shows, and loads nothing."
    if steps := len(page["logged"]):
        summary += (
            f" Of {steps} steps with completions it has {kinds['step']}, with {kinds['group']} of their "
            f"groups and {kinds['tokens']} completions token by token. `covey ui` shows all from the run's "
            "folder."
        )
    return {**pages, address("run", {"run": run}): with_finite_numbers(page | {"report": summary}, DIGITS)}


class _Completions:
    """The completions of some steps as pages of the site."""

    def __init__(self, folder: Path, steps: Sequence[int]) -> None:
        self.folder = folder
        self.logs = {step: read_rollouts(folder, step) for step in steps}
        self.listed = {step: logged_step(folder, step, log) for step, log in self.logs.items()}
        self.orders = {step: [g["group"] for g in page["groups"]] for step, page in self.listed.items()}
        """Step -> its groups, the most telling first."""
        self.samples = dict[tuple[int, int], list[int]]()
        """(step, group) -> the samples that the group's page has, the most telling first."""

    def step(self, step: int) -> Answer:
        """Return the page of a step, which lists its groups."""
        page = self.listed[step]
        return "step", {"step": step}, page | {"groups": page["groups"][:GROUPS]}

    def group(self, step: int, group: int) -> Answer:
        """Return the page of a group; if its texts are very long, with the best and the worst one only."""
        page = group_of(self.folder, step, self.logs[step], group)
        size = sum(len(c["completion"]) for c in page["completions"])
        samples = _choose_samples(page["completions"])[: None if size <= TEXTS else 2]
        self.samples[step, group] = samples
        shown = [c for c in page["completions"] if c["sample"] in samples]
        return (
            "group",
            {"step": step, "group": group},
            page | {"order": self.orders[step], "completions": shown},
        )

    def tokens(self, step: int, group: int, sample: int) -> Answer:
        """Return the page of a completion token by token."""
        query = {"step": step, "group": group, "sample": sample}
        return "tokens", query, logged_completion(self.folder, self.logs[step], group, sample)


def _by_importance(folder: Path, page: Record) -> Iterator[tuple[bool, Answer]]:
    """Yield (whether a report must have it, however large; page of completions), the most important first.

    A report must have the first and the last step, each with its most telling group. Then come the middle
    step and what findings point to, and groups of all these steps by turns, with the tokens of the best and
    the worst completion; at last the tokens of the others.
    """
    logged = page["logged"]
    evidence = list(_evidence(page))
    ends = list(dict.fromkeys([*logged[:1], *logged[-1:]]))
    middle = logged[len(logged) // 2 :][:1]
    others = [step for step in [*middle, *(step for step, _ in evidence)] if step in logged]
    steps = list(dict.fromkeys([*ends, *others]))
    pages = _Completions(folder, steps)
    for step in ends:
        yield True, pages.step(step)
    for step in ends:
        yield True, pages.group(step, pages.orders[step][0])
    for step in steps[len(ends) :]:
        yield False, pages.step(step)
    for step, group in dict.fromkeys([*_logged_groups(evidence, pages), *_by_turns(steps, pages)]):
        if (step, group) not in pages.samples:
            yield False, pages.group(step, group)
        for sample in pages.samples[step, group][:2]:
            yield False, pages.tokens(step, group, sample)
    for (step, group), samples in pages.samples.items():
        for sample in samples[2:]:
            yield False, pages.tokens(step, group, sample)


def _logged_groups(evidence: Sequence[tuple[int, int]], pages: _Completions) -> list[tuple[int, int]]:
    """Return (step, group) of those places that are in the log."""
    return [(step, group) for step, group in evidence if group in pages.orders.get(step, ())]


def _by_turns(steps: Sequence[int], pages: _Completions) -> Iterator[tuple[int, int]]:
    """Yield (step, group): the first group of each step, then the second of each, and so on."""
    for turn in zip_longest(*(pages.orders[step][:GROUPS] for step in steps)):
        for step, group in zip(steps, turn, strict=True):
            if group is not None:
                yield step, group


def _choose_samples(completions: Sequence[Record]) -> list[int]:
    """Return the samples of a group: the best one, the worst one, and the others."""
    scored = sorted((c for c in completions if c["reward"] is not None), key=lambda c: -c["reward"])
    others = [c for c in completions if c["reward"] is None]
    return [c["sample"] for c in (*scored[:1], *scored[:0:-1], *others)]


def _evidence(page: Record) -> Iterator[tuple[int, int]]:
    """Yield step and group of what the findings of a run's page point to; group -1 for a whole step."""
    for finding in page["findings"] or page["remarks"]:
        evidence = finding.get("evidence")
        target = {"step": finding.get("step"), **(evidence if isinstance(evidence, Mapping) else {})}
        step = target["step"]
        group = target.get("group")
        if isinstance(step, int):
            yield step, group if isinstance(group, int) else -1
