"""`covey show` and `covey diff` of another framework's run, by the views of covey's own runs."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from covey.audit.advantages import groups_of, totals
from covey.audit.course import translated
from covey.audit.frameworks import words_of
from covey.audit.record import AuditRecord, Rollout
from covey.audit.sources import open_run
from covey.insight.difference import paired_curves, shared_gain, signed
from covey.insight.show import ShownRecord, course_lines, group_view, spoken_prompt, step_view
from covey.insight.verdict import ends
from covey.runs.rollouts import RolloutLog
from covey_verify.errors import ConfigError


def show_record(path: Path, step: int | None, group: int | None) -> tuple[ShownRecord, list[str]]:
    """Show a run's course, the groups of a step, or a group with its completions. Raises ConfigError."""
    record = open_run(path)
    logs = _by_step(record)
    if step is None:
        metrics = _metrics(record)
        shown = {"run": str(path), "framework": record.header.framework, "metrics": metrics[-1:]}
        head = f"{path} ({record.header.framework}): {len(record.updates)} updates"
        lines = course_lines(metrics, []) if metrics else ["no metrics that covey knows"]
        places = [f"completions: covey show {path} STEP, of {min(logs)} to {max(logs)}"] if logs else []
        return shown, [head, "", *lines, "", *places]
    if step not in logs:
        known = f"it has {min(logs)} to {max(logs)}" if logs else "it has none"
        raise ConfigError(f"{path}: no completions of step {step}; {known}")
    log = _log(path, record, logs[step])
    return step_view(path, step, log) if group is None else group_view(path, step, group, log)


def _by_step(record: AuditRecord) -> dict[int, list[Rollout]]:
    """Return the rollouts before each update: there may be one for each of its micro-batches."""
    found: dict[int, list[Rollout]] = defaultdict(list)
    for rollout in record.rollouts:
        found[rollout.step].append(rollout)
    return found


def _log(path: Path, record: AuditRecord, rollouts: Sequence[Rollout]) -> RolloutLog:
    """Return a step's rollouts in the form of covey's log; their groups are numbered one after another."""
    used = {(use.row.rollout, use.row.completion): use.row.advantage for use in reversed(record.uses)}
    rows: list[dict[str, Any]] = []
    for rollout in rollouts:
        samples = rollout.completions
        rewards = totals(record, samples)[0].tolist()
        first = 1 + max((row["group"] for row in rows), default=-1)
        groups = groups_of(samples)
        for place, (sample, group) in enumerate(zip(samples, groups, strict=True)):
            advantage = used.get((rollout.number, place), sample.advantage)
            ended = not set(sample.ids[-1:] if sample.ids else ()).isdisjoint(record.header.tokens.eos)
            rows.append(
                {
                    "group": first + group,
                    "sample": groups[:place].count(group),
                    "problem": f"of rollout {rollout.number}",
                    "prompt": sample.prompt if sample.prompt is not None else str(sample.prompt_ids),
                    "completion": sample.text if sample.text is not None else str(sample.ids),
                    "reward": None if math.isnan(rewards[place]) else rewards[place],
                    "advantage": advantage if isinstance(advantage, float) else math.nan,
                    "tokens": len(sample.ids) if sample.ids is not None else math.nan,
                    "finish": "with an end token" if ended else "without an end token",
                    "components": sample.rewards,
                    "status": {},
                    "extracted": {},
                    "trained": True,
                }
            )
    return RolloutLog(path, tuple(rows))


def _metrics(record: AuditRecord) -> list[dict[str, float]]:
    """Return the metrics of each step by covey's names, those of completions counted if there are any."""
    words = words_of(record.header.framework)
    steps: dict[int, dict[str, float]] = {}
    for update in record.updates:
        steps.setdefault(update.step, {}).update(translated(words, update.metrics))
        if update.loss is not None:
            steps[update.step].setdefault("loss", update.loss)
    for step, rollouts in _by_step(record).items():
        log = _log(Path(), record, rollouts)
        groups = [[log.rows[n]["reward"] for n in places] for places in log.groups.values()]
        counted = {
            "reward/mean": [row["reward"] for row in log.rows if row["reward"] is not None],
            "length/mean": [row["tokens"] for row in log.rows if not math.isnan(row["tokens"])],
            "groups/dead": [float(len(set(rewards)) == 1) for rewards in groups if len(rewards) > 1],
        }
        found = {name: fmean(values) for name, values in counted.items() if values}
        steps[step] = {**found, **steps.get(step, {})}
    return [{"step": float(step), **steps[step]} for step in sorted(steps)]


def difference_of_records(a: Path, b: Path) -> tuple[Mapping[str, object], list[str]]:
    """Compare run B with run A, of which one at least is another framework's: settings, curves, problems."""
    records = [open_run(path) for path in (a, b)]
    settings = [record.header.settings for record in records]
    names = [n for n in {**settings[0], **settings[1]} if settings[0].get(n) != settings[1].get(n)]
    changed = {name: [own.get(name) for own in settings] for name in names}
    gain, shared = shared_gain(*_on_the_same_problems([_rewards(record) for record in records]))
    lines = [
        f"{name}: {path} ({r.header.framework})" for name, path, r in zip("AB", (a, b), records, strict=True)
    ]
    same = records[0].header.framework == records[1].header.framework
    lines += ["", "what differs", *(f"  {n}: {x} -> {y}" for n, (x, y) in changed.items())] if same else []
    lines += ["", *paired_curves([_metrics(record) for record in records], ([], [])), ""]
    if gain is not None:
        lines.append(f"training reward of {shared} problems that both met, B - A: {signed(gain)}")
    training = {"problems": shared, **ends(gain)} if gain is not None else None
    return {"a": str(a), "b": str(b), "settings": changed, "training": training}, lines


def _rewards(record: AuditRecord) -> dict[str, float]:
    """Return the text of each prompt -> the mean reward of its completions."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in _log(Path(), record, record.rollouts).rows:
        if row["reward"] is not None:
            found[spoken_prompt(row["prompt"])].append(row["reward"])
    return {prompt: float(np.mean(rewards)) for prompt, rewards in found.items()}


def _on_the_same_problems(means: Sequence[Mapping[str, float]]) -> tuple[dict[str, float], dict[str, float]]:
    """Rename B's prompts to A's. Equal ones are the same problem, and so are two of which one contains the
    other as whole words, since frameworks put prompts into templates; but only if no third contains or is
    contained in either.
    """
    a, b = means
    left = [prompt for prompt in a if prompt not in b]
    near = {prompt: [own for own in left if _contains(own, prompt)] for prompt in b if prompt not in a}
    asked = Counter(own for found in near.values() for own in found)
    same = {p: found[0] for p, found in near.items() if len(found) == 1 and asked[found[0]] == 1}
    return dict(a), {same.get(prompt, prompt): mean for prompt, mean in b.items()}


def _contains(one: str, other: str) -> bool:
    """Return whether one text is in the other, and does not begin or end within a word or number there."""
    short, long = sorted((one.strip(), other.strip()), key=len)
    return bool(short) and re.search(rf"(?<!\w){re.escape(short)}(?!\w)", long) is not None
