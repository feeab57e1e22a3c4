"""Rewards over a file of completions that already exist."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from covey.rewards.base import load_rewards, score
from covey.tasks.files import rows
from covey.types import Completion, DataError, Problem


def score_file(file: Path, rewards: Sequence[Any]) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Each row with its rewards by name, and the mean of each. Raises DataError, RewardError."""
    functions = load_rewards(rewards, Path.cwd())
    scored = []
    for line, row in rows(file):
        if "completion" not in row:
            raise DataError(f"{file}:{line}: no column 'completion'; it has {', '.join(map(repr, row))}")
        columns = {k: v for k, v in row.items() if k not in ("completion", "prompt")}
        problem = Problem(f"{file.name}:{line}", row.get("prompt", ""), columns)
        for function in functions:
            if missing := function.missing_columns(list(columns)):
                raise DataError(f"{file}:{line}: reward {function.name} needs column {missing[0]!r}")
        tokens, logprobs = np.zeros(0, np.int64), np.zeros(0, np.float32)
        text = row["completion"] if isinstance(row["completion"], str) else row["completion"][-1]["content"]
        group = score(problem, tokens, [Completion(tokens, logprobs, text, "stop")], functions)
        values = {name: _plain(v[0]) for name, v in group.components.items()}
        scored.append({**row, "rewards": values, "reward": _plain(group.rewards[0])})
    if not scored:
        raise DataError(f"{file}: no rows")
    names = [f.name for f in functions]
    known = {n: [r["rewards"][n] for r in scored if r["rewards"][n] is not None] for n in names}
    return scored, {n: float(np.mean(v)) if v else float("nan") for n, v in known.items()}


def _plain(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
