"""Benchmarks: configs are valid, table and picture say what the curves say, no GPU is no benchmark of it."""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from covey.config.load import load_config
from covey.rewards.base import load_rewards
from covey.runs.estimates import Evaluation
from tests.fakes import as_stream

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
BENCH, PATHOLOGIES = map(importlib.import_module, ("presets", "pathologies"))


@pytest.mark.parametrize("name", BENCH.PRESETS)
def test_every_preset_has_a_valid_config_with_as_many_completions(tmp_path: Path, name: str) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(BENCH.config_of(name, 1, 50, tmp_path)))
    config = load_config(tmp_path / "run.yaml").config
    algorithm = config.algorithm if isinstance(config.algorithm, str) else config.algorithm["name"]
    assert (algorithm, config.seed, config.train.steps) == (name, 1, 50)
    assert config.rollout.group_size * config.rollout.prompts_per_step == 256
    assert (config.train.warmup_steps, config.eval.every) == (5, 10)


def test_the_table_says_what_the_curves_say() -> None:
    fast = BENCH.Curve([0, 10, 20], [0.5, 0.8, 0.95], [0.3, 0.6, 0.9], [0, 1280, 2560])
    slow = BENCH.Curve([0, 10, 20], [0.5, 0.7, 0.85], [0.3, 0.6, 0.7], [0, 1280, 2560])
    rows = BENCH.table({"grpo": [fast, slow], "dapo": [slow]}).splitlines()
    assert rows[2].startswith(
        "| grpo | 15 (10 to 20) | 20 (20 to 20), 1 missed | 2 (1 to 3) | 90 (85 to 95) |"
    )
    assert rows[3].startswith(
        "| dapo | 20 (20 to 20) | not reached | 3 (3 to 3) | 85 (85 to 85) | 70 (70 to 70) |"
    )
    drawn = BENCH.picture({"grpo": [fast, slow], "dapo": [slow]})
    assert drawn.count("<polyline") == drawn.count("<polygon") == 3  # a line and its interval a seed
    assert "0.0,55.0 95.0,22.0 190.0,5.5" in drawn  # 50, 80 and 95 % of an axis of 190 by 110


def test_a_gpu_is_measured_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(__file__).parents[1] / "benchmarks" / "speed"
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["speed", "--gpu"])
    speed = runpy.run_path(str(folder / "__main__.py"))
    with pytest.raises(SystemExit):
        speed["main"]()
    assert "--gpu measures on a GPU, and torch finds none here" in capsys.readouterr().err
    sizes = {size: speed["subject"].matrix_parameters(size) for size in ("0.5B", "1.5B")}
    assert sizes == pytest.approx({"0.5B": 0.494e9, "1.5B": 1.544e9}, rel=1e-3)


def test_a_peer_that_is_not_installed_is_said_once_below_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks" / "speed"))
    quick = importlib.import_module("quick")
    sample = {"cpu": 1.0, "tokens": 10}
    quick.compare(lambda cell, lengths, peer: None if peer == "trl" else [[sample], [sample]], "here")
    said = capsys.readouterr().out
    assert said.count("pip install 'covey[bench]'") == 1
    assert said.index("update, ragged") < said.index("trl is not installed: pip install")
    quick.compare(lambda *_: [[sample], [sample]], "here")
    assert "pip install" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("case", "arm"), [(c, a) for c, case in PATHOLOGIES.CASES.items() for a in case.arms]
)
def test_every_arm_of_a_pathology_has_a_valid_config(tmp_path: Path, case: str, arm: str) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(PATHOLOGIES.config_of_arm(case, arm, 1, 5, tmp_path)))
    config = load_config(tmp_path / "run.yaml").config
    assert config.train.steps == 5
    assert config.rollout.group_size * config.rollout.prompts_per_step == 256
    rewards = load_rewards(config.rewards, tmp_path)
    assert rewards.verdict.name == "math_answer", "the verdict judges, whatever else does"


def accurate(share: float) -> Evaluation:
    right = np.arange(10) < 10 * share
    return Evaluation(right, right.astype(int), right, right.astype(float), samples=1)


def test_a_case_is_told_by_its_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [{"step": s, "accuracy": 0.4, "reward/std": 0.5 if s < 5 else 0.3} for s in range(10)]
    steps = [{**r, "length/truncated": 0.6} for r in steps]
    evals = [{"step": s, **accurate(share).record()} for s, share in ((0, 0.3), (10, 0.5))]
    for name, records in (("metrics", steps), ("evals", evals)):
        (tmp_path / f"{name}.jsonl").write_text(as_stream(records))
    monkeypatch.setattr(PATHOLOGIES, "cold_start", lambda *_: tmp_path)
    monkeypatch.setattr(PATHOLOGIES, "trained", lambda *_: tmp_path)
    section, panel = PATHOLOGIES.run_case("noise", 1, 10)
    assert "| 10 % wrong | 0.4 to 0.4 | 0.5 to 0.3 | 30 to 50 |" in section
    assert "- 10 % wrong: 60 % of the completions are truncated" in section
    assert (panel.lines[0].x, panel.lines[0].y) == ([0, 10], [0.3, 0.5])


def test_every_mistake_has_its_place_in_the_source() -> None:
    """A mutant whose text is gone would be an error only when somebody runs all of them."""
    mutants = importlib.import_module("mutants")
    reasons = {(m.file, m.mistake): mutants.unfit(m) for m in mutants.MUTANTS}
    assert {name: why for name, why in reasons.items() if why} == {}
    # A beginning that no file has any more shows its mistakes to the tests of another room.
    assert set(mutants.NEAR) == {m.near for m in mutants.MUTANTS}
    (first, *_) = mutants.MUTANTS
    assert "no Python" in mutants.unfit(first._replace(new="("))
    assert "0 times" in mutants.unfit(first._replace(old="never written"))
