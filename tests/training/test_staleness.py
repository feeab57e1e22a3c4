"""Runs that sample ahead of training: what they log, how they stop, and what is there after a kill."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.training.runs import fingerprint, interrupted, metrics_of, start

from covey.config.load import ResolvedConfig, load_config
from covey.runs.folder import read_stream
from covey.system.signals import StopSignal
from covey_verify.errors import ConfigError

AHEAD: dict[str, Any] = {"algorithm": "grpo", "rollout": {"staleness": 2}, "train": {"steps": 6}}


def rows(folder: Path, steps: int) -> list[list[dict[str, Any]]]:
    """The log's lines of each step."""
    paths = [folder / "rollouts" / f"step_{step:06d}.jsonl" for step in range(1, steps + 1)]
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]


def problems(folder: Path, steps: int) -> list[list[str]]:
    """The problems that each step has taken, a group each."""
    return [list(dict.fromkeys(row["problem"] for row in step)) for step in rows(folder, steps)]


def test_a_run_ahead_takes_the_problems_of_one_that_is_not_and_logs_versions(tmp_path: Path) -> None:
    ahead = {**AHEAD, "eval": {"every": 3}}
    start(tmp_path / "later", **ahead)
    start(tmp_path / "now", **{**ahead, "rollout": {"staleness": 0}})
    assert problems(tmp_path / "later", 6) == problems(tmp_path / "now", 6)
    for step, record in enumerate(metrics_of(tmp_path / "later")):
        arrays = np.load(tmp_path / "later" / "rollouts" / f"step_{step + 1:06d}.npz")
        assert arrays["versions"].shape == arrays["tokens"].shape
        behind = step - arrays["versions"]
        assert 0 <= behind.min() <= behind.max() <= 2
        assert record["staleness/max"] == behind.max()
        assert record["staleness/mean"] == pytest.approx(behind.mean())
        assert (record["mismatch/mean"] > 0) == (record["staleness/mean"] > 0)
        firsts = arrays["versions"][np.concatenate([[0], arrays["ends"][:-1]])]
        assert [row["version"] for row in rows(tmp_path / "later", 6)[step]] == firsts.tolist()
    assert max(m["staleness/max"] for m in metrics_of(tmp_path / "later")) > 0
    now = metrics_of(tmp_path / "now")[0]
    assert not any(name.startswith("staleness/") for name in now)
    assert [e["step"] for e in read_stream(tmp_path / "later", "evals.jsonl")] == [0, 3, 6]
    assert not (tmp_path / "later" / "pending").exists()


class Killed(BaseException):
    """The end of a process: nothing is saved any more."""


class KillAfter(StopSignal):
    """Ends everything once so many steps were logged."""

    def __init__(self, run: Path, steps: int) -> None:
        super().__init__()
        self.log, self.steps = run / "metrics.jsonl", steps

    def check(self) -> None:
        if self.log.exists() and self.log.read_text().count("\n") >= self.steps:
            raise Killed


def test_after_a_kill_the_steps_that_were_done_come_out_the_same(tmp_path: Path) -> None:
    settings = {**AHEAD, "train": {"steps": 9, "save_every": 4}}
    with pytest.raises(Killed):
        start(tmp_path / "run", KillAfter(tmp_path / "run", 6), **settings)
    assert "sampling" not in {t.name for t in threading.enumerate()}
    before = metrics_of(tmp_path / "run")
    logged = {p.name: p.read_bytes() for p in (tmp_path / "run" / "rollouts").iterdir() if p.suffix == ".npz"}
    assert len(before) == 6, "killed between two checkpoints"
    start(tmp_path / "run", **settings)
    assert metrics_of(tmp_path / "run")[: len(before)] == before
    for name, content in logged.items():
        assert (tmp_path / "run" / "rollouts" / name).read_bytes() == content
    start(tmp_path / "now", **{**settings, "rollout": {"staleness": 0}})
    assert problems(tmp_path / "run", 9) == problems(tmp_path / "now", 9)


def test_a_stop_saves_and_the_run_continues(tmp_path: Path) -> None:
    interrupted(tmp_path / "run", 40, **AHEAD)
    assert "sampling" not in {t.name for t in threading.enumerate()}
    start(tmp_path / "run", **AHEAD)
    assert [m["step"] for m in metrics_of(tmp_path / "run")] == list(range(1, 7))


def test_without_training_nothing_depends_on_when(tmp_path: Path) -> None:
    """With a learning rate of 0 all versions are one policy: two runs ahead are the same."""
    still = {**AHEAD, "train": {"steps": 3, "lr": 0.0}, "data": {"test_size": 1}, "eval": {"problems": 1}}
    for name in ("one", "two"):
        start(tmp_path / name, **still)
    logs = [fingerprint(tmp_path / name) for name in ("one", "two")]
    for name in logs[0]:
        if name.endswith("jsonl") and name.startswith("rollouts"):
            texts = [
                [
                    (r["problem"], r["completion"], r["reward"])
                    for r in rows(tmp_path / n, 3)[int(name[-7]) - 1]
                ]
                for n in ("one", "two")
            ]
            assert texts[0] == texts[1]


def resolved_config(algorithm: object, **rollout: object) -> ResolvedConfig:
    return load_config(values={"algorithm": algorithm, "rollout": {"staleness": 2, **rollout}})


def test_stale_tokens_are_corrected_unless_the_config_says_otherwise() -> None:
    chosen = resolved_config("grpo")
    assert [c.name for c in chosen.algorithm.correction] == ["truncated"]
    assert any("rollout.staleness" in note and "truncated" in note for note in chosen.notes)
    for said in ({"name": "grpo", "correction": None}, {"name": "grpo", "old": "sampler"}):
        assert not resolved_config(said).algorithm.correction
        assert not any("truncated" in note for note in resolved_config(said).notes)
    mine = resolved_config({"name": "grpo", "correction": "decoupled"})
    assert [c.name for c in mine.algorithm.correction] == ["decoupled"]
    assert not resolved_config("grpo", staleness=0).algorithm.correction


@pytest.mark.parametrize("setting", [{"curriculum": "frontier"}, {"adapt_group_size": True}])
def test_what_follows_from_steps_that_have_not_ended_is_refused(setting: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=rf"rollout.{next(iter(setting))} chooses problems.*staleness 0"):
        resolved_config("grpo", **setting)
