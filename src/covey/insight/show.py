"""`covey show`: print a run, a step or a group for a terminal; the run may still be at work."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from covey.insight.conclusion import recorded_conclusion
from covey.insight.findings.finding import Finding
from covey.insight.findings.watch import explain_run
from covey.insight.sample_command import last_turn
from covey.runs.folder import read_numbers, read_stream
from covey.runs.reader import last_stage, read_ending, recorded_settings, recorded_yaml, seconds_of, stages_in
from covey.runs.rollouts import RolloutLog, read_rollouts, recorded_steps
from covey.system.opening import count_lines
from covey.system.plot import Curve, align_columns, bar, draw_curves
from covey.system.text import duration
from covey.tasks.source import EXAMPLES_FILE
from covey_verify.calls.forms import form_of_text
from covey_verify.calls.turn import read_turn
from covey_verify.errors import ConfigError

ShownRecord = Mapping[str, Any]
NumberRecords = Sequence[Mapping[str, float]]
STATE_SHOWN = 500
"""Characters of an environment's final state that are shown."""
TABLE_ROWS = 12
"""Number of steps in a run's table, evenly spread."""
TABLE = {
    "reward": ("reward/mean",),
    "correct": ("accuracy",),
    "dead": ("groups/dead",),
    "truncated": ("length/truncated",),
    "tokens": ("length/mean",),
    "entropy": ("entropy/sampled",),
    "loss": ("loss",),
    "accuracy": ("preference/accuracy", "reward_model/accuracy"),
    "margin": ("preference/margin", "reward_model/margin"),
}
"""Heading -> the metrics that may fill its column; the first that was logged is shown."""
WIDTH = 78
"""Characters of a line of curves."""
PLACES = ("group", "completion", "token")
"""Keys of a finding's evidence that say which completion shows it."""
PROMPT_SHOWN = 40
"""Characters of a prompt in the list of groups."""


def show_run(folder: Path) -> tuple[ShownRecord, list[str]]:
    """Show a run's facts, course and findings: as JSON, and as lines for people."""
    stage = last_stage(folder)
    settings = recorded_settings(stage) or {}
    metrics = read_numbers(stage, "metrics.jsonl")
    evals = read_numbers(stage, "evals.jsonl")
    seconds = seconds_of(stage, read_numbers(stage, "timings.jsonl"))
    conclusion = recorded_conclusion(stage, read_stream(stage, "evals.jsonl"), seconds)
    record: ShownRecord = {
        "run": str(stage),
        "method": settings["method"],
        "steps": len(metrics),
        "of": settings["train"]["steps"],
        "seconds": seconds,
        "conclusion": conclusion.sentence if conclusion else None,
        "ending": read_ending(stage) or None,
        "metrics": metrics[-1] if metrics else None,
        "findings": findings(stage),
        "steps_with_completions": recorded_steps(stage),
        "examples": count_lines(stage, EXAMPLES_FILE) if (stage / EXAMPLES_FILE).is_file() else None,
    }
    lines = [*_facts(folder, stage, record)]
    if metrics or evals:
        lines += ["", *course_lines(metrics, evals)]
    if record["findings"]:
        lines += ["", *record["findings"]]
    if steps := record["steps_with_completions"]:
        lines += ["", f"completions: covey show {stage} STEP, of {steps[0]} to {steps[-1]}"]
    return record, lines


def _facts(folder: Path, stage: Path, record: ShownRecord) -> Iterator[str]:
    """Yield the facts of a run besides its numbers: progress, examples, other stages, conclusion, end."""
    course = f": {record['steps']} of {record['of']} steps in {duration(record['seconds'])}"
    # A filter judges each row once, so it has no steps.
    if record["method"] == "filter":
        course = ""
    yield f"{stage} ({record['method']}){course}"
    if record["examples"] is not None:
        yield f"{record['examples']} examples in {stage / EXAMPLES_FILE}"
    yield from (f"before it: covey show {earlier}" for earlier in stages_in(folder) if earlier != stage)
    yield from (record[name] for name in ("conclusion", "ending") if record[name])


def findings(stage: Path) -> list[str]:
    """Return a run's findings in words; if it logged none, compute them from its records."""
    return list(finding_lines(stage, explain_run(stage).findings))


def what_stands_out(stage: Path, run_findings: Sequence[Finding]) -> list[str]:
    """Return the findings in words, or that there are none, unless the run ended early."""
    nothing = [] if read_ending(stage) else [f"nothing stands out in the metrics of {stage}"]
    return [*finding_lines(stage, run_findings)] or nothing


def finding_lines(stage: Path, run_findings: Sequence[Finding]) -> Iterator[str]:
    """Yield a line for each finding: its step, if it has one, its sentence, and the completion that shows it
    or the command that prints that.
    """
    logged = set(recorded_steps(stage))
    for finding in run_findings:
        step = finding.evidence.get("step")
        group = finding.evidence.get("group")
        places = [f"{name} {finding.evidence[name]}" for name in PLACES if name in finding.evidence]
        example = f" ({', '.join(places)})" if places else ""
        if step in logged and group is not None:
            example = f" (covey show {stage} {step} {group})"
        after = f"step {finding.step}: " if finding.step else ""
        yield f"{after}{finding}{example}"


def course_lines(metrics: NumberRecords, evals: NumberRecords) -> list[str]:
    """Return a run's curves and the table of its steps."""
    return [*_curves(metrics, evals), "", *_table(metrics)]


def _curves(metrics: NumberRecords, evals: NumberRecords) -> list[str]:
    name = "reward" if any("reward/mean" in m for m in metrics) else "loss"
    values = [(m["step"], _column_value(m, name)) for m in metrics]
    points = [(step, value) for step, value in values if value is not None]
    curves = [Curve(name, points)]
    held_out = series(evals, "pass@1")
    if held_out:
        curves.append(Curve("held-out accuracy", held_out, bounds=(0.0, 1.0)))
    last = max([1.0, *(step for curve in curves for step, _ in curve.points)])
    return curve_lines(curves, 5, last)


def series(records: NumberRecords, metric: str) -> list[tuple[float, float]]:
    """Return (step, value) of the records that have a metric."""
    return [(r["step"], r[metric]) for r in records if r.get(metric) is not None]


def curve_lines(curves: Sequence[Curve], height: int, last: float) -> list[str]:
    """Draw curves in characters, ``height`` lines each, over the steps 0 to ``last``."""
    return [line.plain.rstrip() for line in draw_curves(curves, WIDTH, height, last)]


def _table(metrics: NumberRecords) -> list[str]:
    """Return a table of evenly spread steps, including the first and the newest."""
    columns = [name for name in TABLE if any(_column_value(m, name) is not None for m in metrics)]
    columns = [name for name in columns if name != "loss" or "reward" not in columns]
    if not metrics:
        return []
    # Ceiling division; the newest step is added if the stride misses it.
    stride = -(-len(metrics) // TABLE_ROWS)
    steps = sorted({*range(0, len(metrics), stride), len(metrics) - 1})
    rows = [[f"{metrics[n]['step']:.0f}", *(_cell(metrics[n], name) for name in columns)] for n in steps]
    return align_columns([["step", *columns], *rows], numbers=1 + len(columns))


def _cell(record: Mapping[str, float], heading: str) -> str:
    value = _column_value(record, heading)
    return "-" if value is None else f"{value:.3g}"


def _column_value(record: Mapping[str, float], heading: str) -> float | None:
    """Return the value of a column in a step; None if none of its metrics was logged."""
    values = (record.get(name) for name in TABLE[heading])
    return next((value for value in values if value is not None), None)


def show_step(folder: Path, step: int) -> tuple[ShownRecord, list[str]]:
    """Show the groups of a step, those with the widest rewards first."""
    stage = last_stage(folder)
    log = read_rollouts(stage, step)
    return step_view(stage, step, log, advantage_reason(stage, log.rows))


def step_view(stage: Path, step: int, log: RolloutLog, reason: str = "") -> tuple[ShownRecord, list[str]]:
    """Return the groups of a step's log. ``reason``: why dead groups have advantages."""
    rows = sorted((_row(log, n) for n in log.groups), key=lambda r: (-r["spread"], r["group"]))
    # One range for all bars of the step, so that groups can be compared.
    rewards = [r for row in rows for r in row["rewards"] if r is not None]
    low = min(rewards, default=0.0)
    high = max(rewards, default=1.0)
    lines = [f"{stage}, step {step}: {len(rows)} groups, rewards {low:.3g} to {high:.3g}", ""]
    head = ["group", "mean", "tokens", "rewards", "", "prompt"]
    lines += align_columns([head, *(_group_cells(row, low, high) for row in rows)], numbers=3)
    lines += ["", f"dead: the rewards are equal. {reason}"] if reason else []
    record = {"run": str(stage), "step": step, "groups": rows}
    return record, [*lines, "", f"covey show {stage} {step} GROUP"]


def group_facts(log: RolloutLog, number: int) -> dict[str, Any]:
    """Return a group of the rollout log as JSON: its problem, rewards, their mean and their range."""
    rows = [log.rows[n] for n in log.groups[number]]
    rewards = [r["reward"] for r in rows]
    scored = [r for r in rewards if r is not None]
    spread = float(np.ptp(scored)) if scored else 0.0
    return {
        "group": number,
        "problem": rows[0]["problem"],
        "prompt": rows[0]["prompt"],
        "trained": rows[0]["trained"],
        "rewards": rewards,
        "mean": float(np.mean(scored)) if scored else None,
        "spread": spread,
        "dead": rows[0].get("dead", not spread),
    }


def _row(log: RolloutLog, number: int) -> dict[str, Any]:
    facts = group_facts(log, number)
    tokens = float(np.mean([drawn_tokens(log.rows[n]) for n in log.groups[number]]))
    return {**facts, "prompt": spoken_prompt(facts["prompt"]), "tokens": tokens}


def drawn_tokens(row: ShownRecord) -> float:
    """Return the tokens of a logged completion without those that tools inserted, as metrics count them."""
    return float(row["tokens"] - row.get("inserted", 0))


def _group_cells(row: ShownRecord, low: float, high: float) -> list[str]:
    """Return a group's row of the table, with a bar per reward between ``low`` and ``high``."""
    mean = "-" if row["mean"] is None else f"{row['mean']:.3g}"
    bars = "".join("?" if r is None else bar(r, low, high) for r in row["rewards"])
    kind = "" if row["trained"] else "filtered"
    if row["dead"]:
        kind = "dead"
    prompt = " ".join(row["prompt"].split())[:PROMPT_SHOWN]
    tokens = "-" if np.isnan(row["tokens"]) else f"{row['tokens']:.0f}"
    return [str(row["group"]), mean, tokens, bars, kind, prompt]


def advantage_reason(stage: Path, rows: Iterable[Mapping[str, object]]) -> str:
    """Explain why completions of dead groups have advantages; empty if none has."""
    if not any(row.get("dead") and row["advantage"] for row in rows):
        return ""
    kl = (recorded_yaml(stage).get("algorithm") or {}).get("kl") or {}
    if kl.get("place") == "reward":
        return "The KL in the reward, which is not part of the reward that is shown, tells them apart."
    return "This estimator compares with something other than the group, and trains on them nevertheless."


def end_reason(row: Mapping[str, Any], rollout: Mapping[str, Any]) -> str:
    r"""Explain why a logged completion ended; ``rollout`` has the run's settings of that name.

    >>> end_reason({"finish": "stop", "completion": "4."}, {"stop": ["."]})
    "stop string '.'"
    >>> end_reason({"finish": "stop", "completion": "4).\n"}, {"stop": ["."]})
    "stop string '.'"
    >>> end_reason({"finish": "length", "completion": "4"}, {"max_tokens": 64})
    'token limit (rollout.max_tokens 64)'
    """
    if row.get("environment_fault"):
        return f"its environment failed: {row['environment_fault']}"
    if row["finish"] == "length":
        limit = rollout.get("max_tokens")
        return f"token limit (rollout.max_tokens {limit})" if limit else "token limit"
    if row["finish"] != "stop":
        return str(row["finish"])
    turns = row.get("turns") or [{"role": "assistant", "content": row["completion"]}]
    last = str(turns[-1]["content"])
    max_calls = (rollout.get("tools") or {}).get("max_calls")
    model_turns = sum(turn.get("role") == "assistant" for turn in turns)
    # Each turn of the model but the last one was answered.
    if max_calls and model_turns > max_calls and read_turn(last, form=form_of_text(last)).calls:
        return f"tool limit (rollout.tools.max_calls {max_calls}): further calls were not answered"
    # The token that completes a stop string may have more text after it.
    contained = [text for text in rollout.get("stop") or () if text in last]
    first = min(contained, key=lambda text: last.index(text) + len(text), default=None)
    return "end token" if first is None else f"stop string {first!r}"


def show_group(folder: Path, step: int, number: int) -> tuple[ShownRecord, list[str]]:
    """Show the prompt of a group and its completions, best first, with the result of every reward."""
    stage = last_stage(folder)
    return group_view(stage, step, number, read_rollouts(stage, step))


def group_view(stage: Path, step: int, number: int, log: RolloutLog) -> tuple[ShownRecord, list[str]]:
    """Return a group of a step's log. Raises ConfigError if there is none of this number."""
    if number not in log.groups:
        raise ConfigError(f"{stage}: step {step} has no group {number}; it has 0 to {max(log.groups)}")
    rows = [log.rows[n] for n in log.groups[number]]
    # Completions without a reward come last.
    rows.sort(key=lambda r: -np.inf if r["reward"] is None else r["reward"], reverse=True)
    lines = [f"{stage}, step {step}, group {number}: {rows[0]['problem']}", ""]
    lines += _indent_lines(spoken_prompt(rows[0]["prompt"]), "  > ")
    for row in rows:
        lines += ["", *_completion(row)]
    return {"run": str(stage), "step": step, "group": number, "completions": rows}, lines


def _completion(row: Mapping[str, Any]) -> Iterator[str]:
    yield f"sample {row['sample']}: {completion_line(row)}"
    for turn in row.get("turns") or [{"role": "assistant", "content": row["completion"]}]:
        yield from _indent_lines(turn["content"], "  > " if turn["role"] == "tool" else "  | ")
    state = row.get("environment")
    if state is not None:
        yield from _indent_lines(json.dumps(state, ensure_ascii=False)[:STATE_SHOWN], "  = ")


def completion_line(row: Mapping[str, Any]) -> str:
    """Return the facts of a logged completion in one line; unknown facts are left out."""
    facts = ["no reward" if row["reward"] is None else f"reward {row['reward']:.4g}"]
    if not np.isnan(row["advantage"]):
        facts.append(f"advantage {row['advantage']:+.3g}")
    if not np.isnan(row["tokens"]):
        inserted = f" ({row['inserted']} inserted)" if row.get("inserted") else ""
        facts += [f"{row['tokens']} tokens{inserted}", str(row["finish"])]
    rewards = [f"{name} {_component(row, name)}" for name in row["components"]]
    return "; ".join([", ".join(facts), *rewards])


def _component(row: Mapping[str, Mapping[str, Any]], name: str) -> str:
    """Describe the value of a reward, and the reason for it."""
    value = row["components"].get(name)
    status = row["status"].get(name)
    extracted = row["extracted"].get(name)
    reasons = [str(status)] if status not in ("ok", None) else []
    if extracted is not None:
        reasons.append(f"found {extracted!r}")
    reasons += [f"{column} {words!r}" for column, words in row.get("extra", {}).get(name, {}).items()]
    text = f"{value:.3g}" if isinstance(value, float | int) else "-"
    return f"{text} ({', '.join(reasons)})" if reasons else text


def _indent_lines(text: str, prefix: str) -> list[str]:
    """Return lines with a prefix, so that no line of a completion looks like one of covey's.

    Only a newline ends a line: the others that Python knows, such as U+2028, are shown as what they are.
    """
    return [prefix + line for line in text.removesuffix("\n").split("\n")]


def spoken_prompt(prompt: str | Sequence[Mapping[str, object]]) -> str:
    """Return a prompt as text; of a chat, the system message and the last message of the user."""
    system, text = last_turn(prompt)
    return f"{system}\n{text}" if system else text
