"""`covey report`: write the page of a run, or of a pipeline's stages, as one file that asks nobody."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from covey.insight.pages.document import address, document
from covey.insight.pages.records import Record, group_of, run_page, step_of
from covey.insight.pages.thinning import rounded
from covey.insight.pages.tokens import tokens_of
from covey.runs.atomic import write_file
from covey.runs.estimates import Evaluation
from covey.runs.folder import read_numbers, read_stream
from covey.runs.reader import last_stage, recorded_settings, stages_in
from covey.runs.rollouts import read_rollouts, recorded_steps
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
"""What is asked for (`step`, `group`, `tokens`), the query besides the run, and the page."""


def write_report(run: Path, output: Path) -> None:
    """Write the report of a run, or of all stages of a pipeline.

    Raises ConfigError without a run, and CheckpointError if a record of it is damaged.
    """
    stages = [run] if (run / "config.yaml").exists() else stages_in(run) or [last_stage(run)]
    if output.is_dir() or not output.parent.is_dir():
        raise ConfigError(f"--output {output}: name a file in a folder that exists")
    name, answers = run.resolve().name, dict[str, object]()
    room = ROOM // max(1, sum(bool(recorded_steps(stage)) for stage in stages))
    for stage in stages:
        _refuse_damage(stage)
        answers |= _pages(stage, stage.resolve().name, room)
    answers["report?"] = {"name": name, "runs": [stage.resolve().name for stage in stages]}
    modules = ("curves", "step", "tokens", "run", "routes", "report")
    write_file(output, document(name, modules, answers, REFUSAL, plots=True))


def _refuse_damage(stage: Path) -> None:
    """Raise CheckpointError for a damaged record; the page of a run shows what is left of it instead."""
    recorded_settings(stage)
    for name in ("metrics.jsonl", "timings.jsonl"):
        read_numbers(stage, name)
    for record in read_stream(stage, "evals.jsonl"):
        Evaluation.from_record(record)


def _pages(folder: Path, run: str, room: int) -> dict[str, object]:
    """Return address -> page: the run's own, and of its completions those that have room."""
    page, pages, kinds = run_page(run, folder), dict[str, object](), Counter[str]()
    for must, (path, query, full) in _completions(folder, page):
        answer = rounded(full, DIGITS)
        size = len(json.dumps(answer, separators=(",", ":")))
        if size > room and not must:
            break
        room -= size
        pages[address(path, {"run": run, **query})] = answer
        kinds[path] += 1
    said = f"A report of covey {VERSION}: it holds everything that it shows, and loads nothing."
    if steps := len(page["logged"]):
        said += (
            f" Of {steps} steps with completions it has {kinds['step']}, with {kinds['group']} of their "
            f"groups and {kinds['tokens']} completions token by token. `covey ui` shows all from the run's "
            "folder."
        )
    return {**pages, address("run", {"run": run}): rounded(page | {"report": said}, DIGITS)}


def _completions(folder: Path, page: Record) -> Iterator[tuple[bool, Answer]]:
    """Yield pages of completions, each once, and first those that a report must have, however large.

    These are the first and the last step, each with its most telling group. Then come the middle step, what
    findings point to, and further groups of these steps by turns, with the tokens of the best and the worst
    completion; at last the tokens of the others.
    """
    logged, found = page["logged"], list(_evidence(page))
    ends = list(dict.fromkeys([*logged[:1], *logged[-1:]]))
    middle = [*logged[len(logged) // 2 :][:1], *(step for step, _ in found if step in logged)]
    steps = list(dict.fromkeys([*ends, *middle]))
    logs = {step: read_rollouts(folder, step) for step in steps}
    listed = {step: step_of(folder, step, logs[step]) for step in steps}
    orders = {step: [group["group"] for group in listed[step]["groups"]] for step in steps}

    def step_answer(step: int) -> Answer:
        return "step", {"step": step}, listed[step] | {"groups": listed[step]["groups"][:GROUPS]}

    def group_answer(step: int, group: int) -> Answer:
        whole = group_of(folder, step, logs[step], group) | {"order": orders[step]}
        most = None if sum(len(c["completion"]) for c in whole["completions"]) <= TEXTS else 2
        samples[step, group] = _telling(whole["completions"])[:most]
        held = [c for c in whole["completions"] if c["sample"] in samples[step, group]]
        return "group", {"step": step, "group": group}, whole | {"completions": held}

    def token_answer(place: tuple[int, int], sample: int) -> Answer:
        query = {"step": place[0], "group": place[1], "sample": sample}
        return "tokens", query, tokens_of(folder, logs[place[0]], place[1], sample)

    samples = dict[tuple[int, int], list[int]]()
    yield from ((True, step_answer(step)) for step in ends)
    yield from ((True, group_answer(step, orders[step][0])) for step in ends)
    yield from ((False, step_answer(step)) for step in steps if step not in ends)
    turns = zip_longest(*([(step, group) for group in orders[step][:GROUPS]] for step in steps))
    by_turns = (place for turn in turns for place in turn if place)
    for place in dict.fromkeys([*(p for p in found if p[1] in orders.get(p[0], ())), *by_turns]):
        if place not in samples:
            yield False, group_answer(*place)
        yield from ((False, token_answer(place, sample)) for sample in samples[place][:2])
    for place, others in samples.items():
        yield from ((False, token_answer(place, sample)) for sample in others[2:])


def _telling(completions: Sequence[Record]) -> list[int]:
    """Return the samples of a group: the best one, the worst one, and the others."""
    scored = sorted((c for c in completions if c["reward"] is not None), key=lambda c: -c["reward"])
    others = [c for c in completions if c["reward"] is None]
    return [c["sample"] for c in (*scored[:1], *scored[:0:-1], *others)]


def _evidence(page: Record) -> Iterator[tuple[int, int]]:
    """Yield step and group of what the findings of a run's page point to; group -1 for a whole step."""
    for finding in page["findings"] or page["remarks"]:
        place = finding.get("evidence")
        known = {"step": finding.get("step"), **(place if isinstance(place, Mapping) else {})}
        step, group = known["step"], known.get("group")
        if isinstance(step, int):
            yield step, group if isinstance(group, int) else -1
