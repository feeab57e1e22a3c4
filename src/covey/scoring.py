"""Rewards over a file of completions that already exist."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from covey.config.load import load_config
from covey.config.schema import Data
from covey.errors import DataError
from covey.learned import LEARNED
from covey.rewards.audit import check_columns
from covey.rewards.base import Rewards, load_rewards
from covey.rewards.scorer import Scorer
from covey.tasks.files import read_problems, rows
from covey.tasks.source import load_problems
from covey.types import Group, Problem


def score_file(file: Path, rewards: Sequence[object]) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Each row with its rewards, statuses and extracted answers by name, and the mean of each reward.

    Raises DataError, RewardError.
    """
    functions = load_rewards(rewards, Path.cwd(), learned=LEARNED)
    scorer, begun = Scorer(functions), []
    for line, row in rows(file):
        if "completion" not in row:
            raise DataError(f"{file}:{line}: no column 'completion'; it has {', '.join(map(repr, row))}")
        columns = {k: v for k, v in row.items() if k not in ("completion", "prompt")}
        problem = Problem(f"{file.name}:{line}", row.get("prompt", ""), columns)
        check_columns([problem], functions)
        text = row["completion"] if isinstance(row["completion"], str) else row["completion"][-1]["content"]
        begun.append((row, scorer.text(problem, text)))
    if not begun:
        raise DataError(f"{file}: no rows")
    scored = [_scored(row, group.result()) for row, group in begun]
    names = [f.name for f in functions]
    known = {n: [r["rewards"][n] for r in scored if r["rewards"][n] is not None] for n in names}
    return scored, {n: float(np.mean(v)) if v else float("nan") for n, v in known.items()}


def _scored(row: Mapping[str, object], group: Group) -> dict[str, Any]:
    scores = {name: found[0] for name, found in group.scores.items()}
    return {
        **row,
        "rewards": {name: s.value for name, s in scores.items()},
        "status": {name: s.status for name, s in scores.items()},
        "extracted": {name: s.extracted for name, s in scores.items() if s.extracted is not None},
        "reward": None if np.isnan(group.rewards[0]) else float(group.rewards[0]),
    }


def load_for_stress(file: Path, names: Sequence[str]) -> tuple[list[Problem], Rewards]:
    """Problems and rewards of a config, or of a data file with rewards named on the command line."""
    if file.suffix in (".yaml", ".yml"):
        loaded = load_config(file)
        source = load_problems(loaded)
        config, folder = loaded.config, loaded.folder
        problems, specs = source.train, names or config.rewards or source.rewards
        rewards = load_rewards(specs, folder, config.scoring, config.sandbox, LEARNED)
    else:
        problems = read_problems(file, Data())
        rewards = load_rewards(names, Path.cwd(), learned=LEARNED)
    check_columns(problems, rewards)
    return problems, rewards
