"""`covey show`, `diff` and `rescore` for runs of other frameworks, in the views of covey's own runs."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from covey.audit.as_log import by_step, lacking, log_of, metrics_of
from covey.audit.probes import ANSWERS
from covey.audit.readers.sources import open_run
from covey.audit.record import AuditRecord
from covey.insight.difference import paired_curves, shared_gain, signed
from covey.insight.rescore import RescoredGroup, rescored_step
from covey.insight.show import ShownRecord, course_lines, group_view, spoken_prompt, step_view
from covey.models.wording import MEANING
from covey.rewards.reward_checks import check_columns
from covey.rewards.scorer import Rewards, completion_of
from covey.system.text import Say
from covey.types import Problem
from covey_verify.errors import ConfigError, DataError


def show_record(path: Path, step: int | None, group: int | None) -> tuple[ShownRecord, list[str]]:
    """Show a run's course, the groups of a step, or a group with its completions. Raises ConfigError."""
    record = open_run(path)
    logs = by_step(record)
    if step is None:
        metrics = metrics_of(record)
        shown = {"run": str(path), "framework": record.header.framework, "metrics": metrics[-1:]}
        head = f"{path} ({record.header.framework}): {len(record.updates)} updates"
        lines = course_lines(metrics, []) if metrics else ["no metrics that covey knows"]
        places = [f"completions: covey show {path} STEP, of {min(logs)} to {max(logs)}"] if logs else []
        return shown, [head, "", *lines, "", *places]
    if step not in logs:
        range_of_steps = f"it has {min(logs)} to {max(logs)}" if logs else "it has none"
        raise ConfigError(f"{path}: no completions of step {step}; {range_of_steps}")
    log = log_of(path, record, logs[step])
    return step_view(path, step, log) if group is None else group_view(path, step, group, log)


def difference_of_records(a: Path, b: Path) -> tuple[Mapping[str, object], list[str]]:
    """Compare the settings, curves and problems of runs A and B, at least one of another framework."""
    records = [open_run(path) for path in (a, b)]
    settings = [record.header.settings for record in records]
    names = [n for n in {**settings[0], **settings[1]} if settings[0].get(n) != settings[1].get(n)]
    changed = {name: [values.get(name) for values in settings] for name in names}
    gain, shared = shared_gain(*with_prompts_of_first([_rewards(record) for record in records]))
    lines = [
        f"{name}: {path} ({r.header.framework})" for name, path, r in zip("AB", (a, b), records, strict=True)
    ]
    same = records[0].header.framework == records[1].header.framework
    lines += ["", "what differs", *(f"  {n}: {x} -> {y}" for n, (x, y) in changed.items())] if same else []
    lines += ["", *paired_curves([metrics_of(record) for record in records], ([], [])), ""]
    if gain is not None:
        lines.append(f"training reward of {shared} problems that both met, B - A: {signed(gain)}")
    training = {"problems": shared, **gain.as_json()} if gain is not None else None
    return {"a": str(a), "b": str(b), "settings": changed, "training": training}, lines


def rescore_record(path: Path, rewards: Rewards, steps: int, say: Say) -> list[RescoredGroup]:
    """Score the completions of a run's last ``steps`` rollouts again, with the columns of its rows.

    A column named like an answer is also available as `answer`. ``say`` reports that thoughts are read by
    their usual tags. Raises DataError if the run lacks completions, texts or columns.
    """
    record = open_run(path)
    if "text" not in record.fields:
        raise DataError(f"{path}: {lacking(record) or 'no texts'} Rewards read texts")
    say(f"the model's template is not known: {MEANING}")
    groups = list[RescoredGroup]()
    for step, rollouts in sorted(by_step(record).items())[-steps:]:
        log = log_of(path, record, rollouts)
        first = [log.rows[places[0]] for places in log.groups.values()]
        problems = [
            Problem(f"{path}, step {step}: {row['problem']}", row["prompt"], _columns(row)) for row in first
        ]
        check_columns(problems, rewards)
        completions = [completion_of(row["completion"]) for row in log.rows]
        groups += rescored_step(log, step, problems, completions, rewards)
    return groups


def _columns(row: Mapping[str, Any]) -> dict[str, object]:
    """Return the columns of a completion's row, with its answer also under the name that rewards expect."""
    columns = dict(row["columns"])
    named = next((columns[name] for name in ANSWERS if name in columns), None)
    return columns if named is None else {"answer": named, **columns}


def _rewards(record: AuditRecord) -> dict[str, float]:
    """Return the mean reward of each prompt's completions by the prompt's text."""
    by_prompt: dict[str, list[float]] = defaultdict(list)
    for row in log_of(Path(), record, record.rollouts).rows:
        if row["reward"] is not None:
            by_prompt[spoken_prompt(row["prompt"])].append(row["reward"])
    return {prompt: float(np.mean(rewards)) for prompt, rewards in by_prompt.items()}


def with_prompts_of_first(means: Sequence[Mapping[str, float]]) -> tuple[dict[str, float], dict[str, float]]:
    """Return A's means and B's, of which B's prompts are renamed to A's.

    Equal prompts are the same problem, and so are two of which one contains the other as whole words, since
    frameworks put prompts into templates; but only if no third contains or is contained in either.
    """
    a, b = means
    unmatched = [prompt for prompt in a if prompt not in b]
    near = {
        prompt: [candidate for candidate in unmatched if _contains(candidate, prompt)]
        for prompt in b
        if prompt not in a
    }
    claims = Counter(candidate for candidates in near.values() for candidate in candidates)
    same = {
        p: candidates[0]
        for p, candidates in near.items()
        if len(candidates) == 1 and claims[candidates[0]] == 1
    }
    return dict(a), {same.get(prompt, prompt): mean for prompt, mean in b.items()}


def _contains(first: str, second: str) -> bool:
    """Return whether one text contains the other as whole words and numbers."""
    short, long = sorted((first.strip(), second.strip()), key=len)
    return bool(short) and re.search(rf"(?<!\w){re.escape(short)}(?!\w)", long) is not None
