"""The JSON that the pages show of a step of the rollout log: its groups, and one group's completions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from covey.insight.pages.lab import first_words
from covey.insight.pages.thinning import Record
from covey.insight.show import advantage_reason, drawn_tokens, end_reason, group_facts
from covey.rewards.loading import BUILT_IN
from covey.runs.reader import recorded_yaml
from covey.runs.rollouts import RolloutLog, read_rollouts, recorded_steps
from covey_verify.errors import ConfigError, CoveyError
from covey_verify.extract import prompt_text

PROMPT = 400
"""Number of characters of a prompt in the grid of groups."""


def step_page(folder: Path, number: int) -> Record:
    """Return the groups of a step: trained and live ones first, by the spread of their rewards."""
    return logged_step(folder, number, read_rollouts(folder, number))


def logged_step(folder: Path, number: int, log: RolloutLog) -> Record:
    """Return the page of a step whose log was read."""
    groups = [_group_row(log, group) for group in log.groups]
    groups.sort(key=lambda g: (not g["trained"], g["dead"], -g["spread"], g["group"]))
    reason = advantage_reason(folder, log.rows)
    logged = recorded_steps(folder)
    return {"step": number, "logged": logged, "of": len(groups), "advantage_reason": reason, "groups": groups}


def completions_with_words(folder: Path, number: int, words: str) -> Record:
    """Return the groups of a step that have these words, with the number of completions that have them.

    A group whose prompt has the words counts with all its completions. Case does not matter.
    """
    log = read_rollouts(folder, number)
    lowered = words.lower()

    def count(places: Sequence[int]) -> int:
        rows = [log.rows[i] for i in places]
        if lowered in prompt_text(rows[0]["prompt"]).lower():
            return len(rows)
        return sum(lowered in row["completion"].lower() for row in rows)

    counts = {group: count(places) for group, places in log.groups.items()}
    return {"groups": [{"group": group, "completions": n} for group, n in counts.items() if n]}


def _group_row(log: RolloutLog, group: int) -> Record:
    rows = [log.rows[i] for i in log.groups[group]]
    facts = group_facts(log, group)
    rewards = [r for r in facts["rewards"] if r is not None]
    return {
        **facts,
        "prompt": prompt_text(facts["prompt"])[:PROMPT],
        "lengths": [drawn_tokens(r) for r in rows],
        "truncated": sum(r["finish"] == "length" for r in rows),
        # The std of equal rewards may be a rounding error, which is no spread.
        "spread": float(np.std(rewards)) if facts["spread"] else 0.0,
        "texts": len({r["completion"] for r in rows}),
    }


def group_page(folder: Path, number: int, group: int) -> Record:
    """Return a group: its completions with the results of all rewards."""
    log = read_rollouts(folder, number)
    if group not in log.groups:
        raise ConfigError(f"{folder}: step {number} has no group {group}")
    order = [g["group"] for g in logged_step(folder, number, log)["groups"]]
    return {**group_of(folder, number, log, group), "order": order}


def group_of(folder: Path, number: int, log: RolloutLog, group: int) -> Record:
    """Return the page of a group of a log, without the order of the step's groups."""
    rows = [log.rows[i] for i in log.groups[group]]
    return {
        **_group_row(log, group),
        "step": number,
        "prompt": rows[0]["prompt"],
        "weights": rows[0]["weights"],
        "greedy_reward": rows[0]["greedy_reward"],
        "advantage_reason": advantage_reason(folder, rows),
        "completions": [page_row(row, rollout_settings(folder)) for row in rows],
        "hints": reward_hints(rows[0]["components"]),
    }


def page_row(row: Mapping[str, object], rollout: Mapping[str, object]) -> Record:
    """Return a row of the log for its page, with the reason of its end and without the group's own fields."""
    fields = {name: value for name, value in row.items() if name not in ("prompt", "weights")}
    return fields | {"ended": end_reason(row, rollout)}


def rollout_settings(folder: Path) -> Mapping[str, object]:
    """Return a run's settings of sampling; none if they cannot be read."""
    try:
        return recorded_yaml(folder).get("rollout") or {}
    except CoveyError:
        return {}


def reward_hints(names: Iterable[str]) -> dict[str, str]:
    """Return the first paragraph on each of the built-in rewards among these names."""
    return {name: first_words(BUILT_IN[name]) for name in names if name in BUILT_IN}
