"""What a run has sampled as examples to learn from: best against worst of a group, and what was correct."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from covey.config.schema import Keep
from covey.errors import ConfigError, DataError
from covey.runs.atomic import make_folder, write_file
from covey.runs.reader import stages_in
from covey.runs.rollouts import read_rollouts, recorded_steps
from covey.types import Problem

ExampleRow = dict[str, object]


class LoggedSample(NamedTuple):
    """A completion in the log of a run."""

    step: int
    group: int
    problem: str
    prompt: object
    completion: str
    finish: str
    reward: float | None
    components: Mapping[str, float | None]
    turns: Sequence[Mapping[str, object]] = ()


def sampled_groups(run: Path) -> Iterator[list[LoggedSample]]:
    """The groups of a run, or of each stage of a pipeline, in the order of sampling.

    Raises CheckpointError naming a damaged file, DataError where nothing was sampled.
    """
    logged = [(folder, step) for folder in (run, *stages_in(run)) for step in recorded_steps(folder)]
    if not logged:
        raise DataError(f"{run}: nothing was sampled there (no rollouts/step_*.jsonl)")
    for folder, step in logged:
        log = read_rollouts(folder, step)
        for places in log.groups.values():
            rows = (log.rows[place] for place in places)
            yield [LoggedSample(**{n: row[n] for n in LoggedSample._fields if n in row}) for row in rows]


def write_pairs(run: Path, output: Path, margin: float, per_problem: int) -> dict[str, object]:
    """Write the pairs of a run to a file and count them. Raises DataError where there are none."""
    if not margin >= 0 or per_problem < 1:
        raise ConfigError("--margin is at least 0, --per-problem at least 1")
    if output.is_dir():
        raise ConfigError(f"--output {output}: this is a folder; name a file")
    groups = list(sampled_groups(run))
    rows = pairs_of(groups, Keep(margin=margin, per_problem=per_problem), {})
    if not rows:
        raise DataError(
            f"{run}: none of {len(groups)} groups has whole completions whose rewards differ by more than "
            f"{margin:g}; {mostly_truncated(groups) or 'ask for less (--margin)'}"
        )
    make_folder(output.parent)
    write_file(output, as_jsonl(rows))
    return {"pairs": len(rows), "groups": len(groups), "output": str(output)}


def pairs_of(
    groups: Iterable[Sequence[LoggedSample]], keep: Keep, columns: Mapping[str, Problem]
) -> list[ExampleRow]:
    """The best against the worst of each group, then the next of each, by more than ``keep.margin``.

    Truncated completions are left out: their end is not the model's. ``columns``: the problems by id, whose
    columns go along.
    """
    rows: dict[str, ExampleRow] = {}
    for group in groups:
        whole = [(s.reward, s) for s in group if s.reward is not None and s.finish == "stop"]
        ranked = sorted(whole, key=lambda pair: -pair[0])
        count = min(len(ranked) // 2, keep.per_problem)
        for (best, chosen), (worst, rejected) in zip(ranked[:count], ranked[::-1], strict=False):
            if best - worst <= keep.margin or chosen.completion == rejected.completion:
                continue
            row = {
                "prompt": chosen.prompt,
                "chosen": _said(chosen),
                "rejected": _said(rejected),
                "margin": best - worst,
                **_columns(chosen, columns),
            }
            identity = [row[name] for name in ("prompt", "chosen", "rejected")]
            rows.setdefault(json.dumps(identity, ensure_ascii=False), row)
    return list(rows.values())


def kept_of(
    groups: Iterable[Sequence[LoggedSample]], verdict: str, keep: Keep, columns: Mapping[str, Problem]
) -> list[ExampleRow]:
    """Correct completions that pass ``keep.least``, at most ``keep.per_problem`` of each, no text twice."""
    least = {verdict: 0.5, **keep.least}
    kept: dict[str, dict[str, ExampleRow]] = {}
    for sampled in (s for group in groups for s in group if s.finish == "stop"):
        values = {name: sampled.components.get(name) for name in least}
        if not all(v is not None and v >= least[name] for name, v in values.items()):
            continue
        if (values[verdict] or 0.0) <= 0.5:
            continue
        texts = kept.setdefault(sampled.problem, {})
        if len(texts) < keep.per_problem:
            row = {"prompt": sampled.prompt, "completion": _said(sampled), **_columns(sampled, columns)}
            texts.setdefault(" ".join(sampled.completion.split()), row)
    return [row for texts in kept.values() for row in texts.values()]


def mostly_truncated(groups: Iterable[Sequence[LoggedSample]]) -> str:
    """What to do where most completions are left out because they are truncated; empty where few are."""
    samples = [s for group in groups for s in group]
    whole = sum(s.finish == "stop" for s in samples)
    if 2 * whole > len(samples):
        return ""
    return (
        f"{len(samples) - whole} of {len(samples)} completions are truncated, and those are left out: raise "
        "rollout.max_tokens, or train the model to end its answers first"
    )


def _said(sampled: LoggedSample) -> object:
    """A completion in the form of its prompt; with what tools said in it, only messages can tell who did.

    Raises DataError where the prompt is text and a tool answered.
    """
    if not isinstance(sampled.prompt, str):
        # Their content has the calls as the model wrote them: a template would write `tool_calls` once more.
        said = [{"role": turn["role"], "content": turn["content"]} for turn in sampled.turns]
        return said or [{"role": "assistant", "content": sampled.completion}]
    if sampled.turns:
        raise DataError(
            f"{sampled.problem}: a tool answered, and in an example of plain text nobody could tell what the "
            "model has to write from what the tool said; set data.chat: true"
        )
    return sampled.completion


def _columns(sampled: LoggedSample, columns: Mapping[str, Problem]) -> ExampleRow:
    """The columns of a problem, for the rewards; not those of examples."""
    problem = columns.get(sampled.problem)
    if problem is not None and not same_prompt(problem.prompt, sampled.prompt):
        raise DataError(
            f"{sampled.problem} has another prompt than when its completions were sampled: put the data "
            "back, or sample anew with another output"
        )
    taken = ("prompt", "completion", "chosen", "rejected", "label", "labels", "margin", "messages")
    return {k: v for k, v in (problem.columns if problem else {}).items() if k not in taken}


def same_prompt(prompt: object, logged: object) -> bool:
    """Whether a problem's prompt is the one that a log of completions names."""
    return json.loads(json.dumps(prompt, default=str)) == logged


def as_jsonl(rows: Iterable[Mapping[str, object]]) -> str:
    """Rows, a line each."""
    return "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
