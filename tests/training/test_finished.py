"""A run that has ended: asked for more, lacking its model, moved, or lying where nothing can be written."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tests.fakes import rows_of
from tests.training.runs import StopAt, fingerprint, interrupted, start

from covey.cli import main
from covey.errors import CheckpointError
from covey.insight.pages.records import run_page
from covey.insight.pages.report import write_report
from covey.insight.show import show_run
from covey.runs.estimates import Evaluation
from covey.training.options import RunOptions
from covey_verify.errors import ConfigError

REWARDS = "def varied(completion):\n    return len(completion) + sum(map(ord, completion)) % 7\n"


def lines(folder: Path) -> int:
    return len((folder / "metrics.jsonl").read_text().splitlines())


@pytest.mark.parametrize("settings", [{}, {"eval": {"every": 2}}, {"method": "sft"}])
def test_more_steps_are_trained_as_if_they_had_been_asked_for_at_once(tmp_path: Path, settings: Any) -> None:
    start(tmp_path / "once", **settings, train={"steps": 7})
    start(tmp_path / "twice", **settings, train={"steps": 4})
    (result,) = start(tmp_path / "twice", **settings, train={"steps": 7})
    assert result.steps == 7
    assert fingerprint(tmp_path / "once") == fingerprint(tmp_path / "twice")


def test_more_steps_continue_where_they_were_interrupted(tmp_path: Path) -> None:
    start(tmp_path / "once", train={"steps": 8})
    start(tmp_path / "parts", train={"steps": 4})
    interrupted(tmp_path / "parts", 60, train={"steps": 8})
    (result,) = start(tmp_path / "parts", train={"steps": 8})
    assert result.steps == 8
    assert fingerprint(tmp_path / "once") == fingerprint(tmp_path / "parts")


def test_more_steps_continue_from_an_earlier_checkpoint_where_the_last_is_damaged(tmp_path: Path) -> None:
    """The hashes of the ended run's result were compared with logs that were shorter already."""
    start(tmp_path / "once", train={"steps": 6, "save_every": 1})
    start(tmp_path / "twice", train={"steps": 4, "save_every": 1})
    weights = tmp_path / "twice" / "checkpoints" / "step_000004" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    (result,) = start(tmp_path / "twice", train={"steps": 6, "save_every": 1})
    assert result.steps == 6
    assert fingerprint(tmp_path / "once") == fingerprint(tmp_path / "twice")


def test_more_steps_under_a_schedule_that_counts_them_need_resume(tmp_path: Path) -> None:
    cosine = {"steps": 4, "schedule": "cosine"}
    start(tmp_path / "run", train=cosine)
    with pytest.raises(ConfigError, match=r"train.steps is 4 there, 6 here \(breaks exactness\)"):
        start(tmp_path / "run", train={**cosine, "steps": 6})
    (result,) = start(tmp_path / "run", train={**cosine, "steps": 6}, options=RunOptions(changes=True))
    assert (result.steps, lines(tmp_path / "run")) == (6, 6)


def test_a_run_that_has_ended_says_what_it_can_no_longer_follow(tmp_path: Path) -> None:
    start(tmp_path / "run")
    with pytest.raises(
        ConfigError, match=r"has ended, so no step is left for these changes: train.lr is 0.001 there"
    ):
        start(tmp_path / "run", train={"lr": 1e-4}, options=RunOptions(changes=True))
    start(tmp_path / "run", train={"keep": 7}, options=RunOptions(changes=True))


def test_a_final_model_that_is_gone_is_written_anew(tmp_path: Path) -> None:
    start(tmp_path / "run")
    before, metrics = fingerprint(tmp_path / "run"), (tmp_path / "run/metrics.jsonl").read_bytes()
    shutil.rmtree(tmp_path / "run/final")
    start(tmp_path / "run")
    assert fingerprint(tmp_path / "run") == before
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == metrics


def test_a_final_model_that_is_gone_with_its_checkpoints_is_an_error(tmp_path: Path) -> None:
    start(tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints")
    for steps, says in ((4, "lacks .*final"), (6, "after 4 steps and the config now asks for 6")):
        shutil.rmtree(tmp_path / "run/final", ignore_errors=True)
        with pytest.raises(CheckpointError, match=f"{says}, but no checkpoint is left"):
            start(tmp_path / "run", train={"steps": steps})
    assert lines(tmp_path / "run") == 4


def test_a_damaged_final_model_is_named_and_not_overwritten(tmp_path: Path) -> None:
    start(tmp_path / "run")
    path = tmp_path / "run/final/model.safetensors"
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"final/model.safetensors is not as it was written.*remove"):
        start(tmp_path / "run")
    assert path.read_bytes() == content


def test_a_goal_that_was_reached_is_not_trained_past(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"train": {"steps": 9, "stop_at": 0.01}, "eval": {"every": 2}}
    (first,) = start(tmp_path / "run", **settings)
    assert first.steps < 9
    measured_at = [record["step"] for record in rows_of(tmp_path / "run/evals.jsonl")]
    assert measured_at == sorted(set(measured_at)), "the evaluation that reached the goal is the last one"
    (again,) = start(tmp_path / "run", **settings)
    assert again == first


STAGES = ({"method": "sft", "train": {"steps": 2}}, {"method": "rl", "train": {"steps": 4}})


def pipeline(project: Path) -> None:
    (project / "rewards.py").write_text(REWARDS)
    config = {
        "output": "out",
        "data": {"task": "last_digit", "train_size": 64, "test_size": 16},
        "rewards": ["rewards.py:varied"],
        "rollout": {"group_size": 4, "prompts_per_step": 4, "max_tokens": 12},
        "train": {"lr": 1e-3, "save_every": 1},
        "eval": {"problems": 8, "samples": 2},
        "threads": 1,
        "stages": list(STAGES),
    }
    (project / "run.yaml").write_text(yaml.safe_dump(config))


def test_a_pipeline_that_was_moved_in_its_second_stage_continues(tmp_path: Path, monkeypatch, capsys) -> None:
    pipeline(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "run.yaml", "--output", "whole"]) in (0, 1)
    assert main(["train", "run.yaml", "--inject", "step.sigterm@5"]) == 75
    assert (tmp_path / "out/2-rl").is_dir()
    (tmp_path / "else").mkdir()
    (tmp_path / "out").rename(tmp_path / "else/moved")
    assert main(["eval", "else/moved"]) == 0
    capsys.readouterr()
    assert main(["resume", "else/moved", "--strict"]) in (0, 1), capsys.readouterr().err
    for stage in ("1-sft", "2-rl"):
        weights = [
            (p / stage / "final/model.safetensors").read_bytes() for p in map(Path, ("whole", "else/moved"))
        ]
        assert weights[0] == weights[1]


def test_a_stage_is_not_trained_on_under_the_next_one(tmp_path: Path) -> None:
    start(tmp_path / "run", stages=STAGES)
    longer = ({**STAGES[0], "train": {"steps": 3}}, STAGES[1])
    with pytest.raises(CheckpointError, match=r"2-rl began from the result of .*Remove .*2-rl"):
        start(tmp_path / "run", stages=longer)
    assert lines(tmp_path / "run/1-sft") == 2
    shutil.rmtree(tmp_path / "run/1-sft/final")  # the same steps give the same model
    start(tmp_path / "run", stages=STAGES)


def test_a_run_that_has_ended_can_be_shown_where_nothing_can_be_written(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    pipeline(tmp_path)
    assert main(["train", str(tmp_path / "run.yaml"), "--output", str(tmp_path / "out")]) in (0, 1)

    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for name in ("unlink", "rename", "replace", "mkdir"):
        monkeypatch.setattr(Path, name, refused)
    capsys.readouterr()
    assert main(["resume", str(tmp_path / "out")]) in (0, 1)
    assert "final" in capsys.readouterr().out


def test_checkpoint_and_rollout_files_of_the_user_are_left_alone(tmp_path: Path) -> None:
    interrupted(tmp_path / "run", 60)
    mine = [tmp_path / "run" / p for p in ("rollouts/my_notes_10.txt", "rollouts/step_000099_copy.jsonl")]
    mine += [tmp_path / "run/checkpoints/.tmp-notes", tmp_path / "run/rollouts/step_9.jsonl"]
    for path in mine:
        path.write_text("mine")
    best = tmp_path / "run/checkpoints/step_best"
    best.mkdir()
    target = tmp_path / "elsewhere"
    target.mkdir()
    (target / "kept").write_text("kept")
    link = tmp_path / "run/checkpoints/.tmp-step_000002.77"
    link.symlink_to(target)
    start(tmp_path / "run", StopAt())
    assert all(path.read_text() == "mine" for path in mine)
    assert best.is_dir()
    assert not link.is_symlink()
    assert (target / "kept").exists()
    assert json.loads((tmp_path / "run/result.json").read_text())["steps"] == 4


def held_out(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "evals.jsonl").read_text().splitlines()]


def test_a_stage_that_stops_at_a_bar_is_measured_again_on_problems_that_did_not_decide(
    tmp_path: Path,
) -> None:
    settings: dict[str, Any] = {"train": {"steps": 9, "stop_at": 0.01}, "eval": {"every": 2}}
    (result,) = start(tmp_path / "run", **settings)
    assert result.conclusion is not None
    # 16 held-out problems, of which 8 are looked at.
    assert "; stopped at 1 % sampled; on 8 other problems 100 % [" in result.conclusion.sentence
    (event,) = [
        e for line in (tmp_path / "run/events.jsonl").read_text().splitlines()
        if (e := json.loads(line)).get("event") == "measured again"
    ]  # fmt: skip
    assert event["problems"] == 8
    said = result.conclusion.sentence
    write_report(tmp_path / "run", tmp_path / "report.html")
    assert json.dumps(said) in (tmp_path / "report.html").read_text()
    assert said in show_run(tmp_path / "run")[1]
    assert run_page("run", tmp_path / "run")["conclusion"] == vars(result.conclusion)
    (whole,) = start(tmp_path / "whole", eval={"every": 2})
    assert whole.conclusion is not None
    assert "others" not in whole.conclusion.sentence


@pytest.mark.parametrize(
    ("bar", "second", "ends"), [(0.6, True, True), (0.6, False, False), (0.3, False, True)]
)
def test_without_a_second_measurement_the_lower_end_has_to_reach_the_bar(
    bar: float, second: bool, ends: bool
) -> None:
    """Sampled accuracy is 5 in 8 of 16 problems; greedy accuracy is another thing."""
    right = np.arange(16) % 8 < 5
    found = Evaluation(~right, right.astype(int), right, right.astype(float), 1, "answer")
    assert found.reaches(bar, second) == ends
    nothing = Evaluation(right, np.zeros(16, int), right, right.astype(float), 1, "answer")
    assert not nothing.reaches(0.1, second), "it is sampled accuracy that reaches a bar"
