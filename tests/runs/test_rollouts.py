"""The rollout log, read back: what is not as it was written is named."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes import rewrite_rollouts, rows_of
from tests.insight.pages.conftest import log_step, made_group

from covey.errors import CheckpointError
from covey.runs.folder import RunFolder
from covey.runs.rollouts import read_rollouts

ROWS: list[Callable[[dict[str, Any]], object]] = [
    lambda row: row.update(reward="1"),
    lambda row: row.update(reward=[1.0]),
    lambda row: row.update(tokens=None),
    lambda row: row.update(group=True),
    lambda row: row.update(prompt=[1]),
    lambda row: row.update(completion=7),
    lambda row: row.update(components=None),
    lambda row: row.update(components={"answer": "good"}),
    lambda row: row.update(extracted=[]),
    lambda row: row.update(sample=0),
    lambda row: row.pop("advantage"),
]
ARRAYS: list[Callable[[dict[str, np.ndarray]], object]] = [
    lambda a: a.pop("advantages"),
    lambda a: a.pop("prompt_ends"),
    lambda a: a.update(ends=a["ends"][:-1]),
    lambda a: a.update(ends=a["ends"][::-1]),
    lambda a: a.update(ends=a["ends"] * np.nan),
    lambda a: a.update(tokens=a["tokens"][:-1]),
    lambda a: a.update(logprobs=a["logprobs"][:, None]),
    lambda a: a.update(tokens=a["tokens"].astype(str)),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run with one step in its log: two groups of two."""
    run = RunFolder(tmp_path / "run")
    log_step(run, 0, [made_group([1, 0], ["4", "5"]), made_group([0, 0], ["a", "b"])])
    run.close()
    return tmp_path / "run"


def test_what_was_written_is_read(folder: Path) -> None:
    log = read_rollouts(folder, 0)
    assert list(log.groups) == [0, 1]
    assert len(log.of_completion(3)["tokens"]) == log.rows[3]["tokens"]


@pytest.mark.parametrize("damaged", ROWS)
def test_a_row_of_other_types_or_there_twice_is_named_by_its_line(folder: Path, damaged) -> None:
    path = folder / "rollouts/step_000000.jsonl"
    rows = rows_of(path)
    damaged(rows[1])
    rewrite_rollouts(folder, 0, rows)
    with pytest.raises(CheckpointError, match=r"step_000000\.jsonl:2: damaged"):
        read_rollouts(folder, 0)


def test_rows_that_changed_places_are_not_given_the_tokens_of_each_other(folder: Path) -> None:
    """Each is sealed, so nothing but its place says whose the arrays are."""
    path = folder / "rollouts/step_000000.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    for changed, number in (
        ([lines[1], lines[0], *lines[2:]], 1),
        ([lines[0], lines[3], lines[2], lines[1]], 2),
        ([*lines[2:], *lines[:2]], 3),
    ):
        path.write_text("".join(changed))
        with pytest.raises(CheckpointError, match=rf"step_000000\.jsonl:{number}: damaged: another line"):
            read_rollouts(folder, 0)


def test_a_row_of_another_run_or_step_is_named(folder: Path, tmp_path: Path) -> None:
    other = RunFolder(tmp_path / "other")
    groups = [made_group([0, 1], ["7", "8"]), made_group([1, 0], ["c", "d"])]
    for step in (0, 1):
        log_step(other, step, groups if step == 0 else [made_group([1, 0], ["4", "5"])] * 2)
    other.close()
    path = folder / "rollouts/step_000000.jsonl"
    own = path.read_text().splitlines(keepends=True)
    for step in (0, 1):
        foreign = (tmp_path / f"other/rollouts/step_{step:06d}.jsonl").read_text().splitlines(keepends=True)
        path.write_text("".join([*own[:2], foreign[2], own[3]]))
        with pytest.raises(CheckpointError, match=r"step_000000\.jsonl:3: damaged: another line"):
            read_rollouts(folder, 0)


def test_a_log_that_is_no_file_is_named(folder: Path) -> None:
    path = folder / "rollouts/step_000000.jsonl"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match=r"step_000000\.jsonl"):
        read_rollouts(folder, 0)


@pytest.mark.parametrize("damaged", ARRAYS)
def test_arrays_that_do_not_fit_the_rows_are_named(folder: Path, damaged) -> None:
    path = folder / "rollouts/step_000000.npz"
    with np.load(path) as archive:
        arrays = dict(archive)
    damaged(arrays)
    rewrite_rollouts(folder, 0, rows_of(path.with_suffix(".jsonl")), arrays)
    with pytest.raises(CheckpointError, match=r"step_000000\.npz: damaged"):
        read_rollouts(folder, 0).of_completion(0)
