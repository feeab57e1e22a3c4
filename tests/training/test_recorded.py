"""`covey eval RUN` and `covey check RUN`: the run's own model, wherever the command is given."""

from __future__ import annotations

import importlib
import json
from datetime import datetime
from pathlib import Path

import pytest
import torch
import yaml
from tests.training.runs import StopAt

from covey.cli import main
from covey.commands.inference import evaluate_once
from covey.config.load import load_config
from covey.errors import Stopped
from covey.models import chat
from covey.models.tiny import CHAT_TEMPLATE, build_model, build_tokenizer
from covey.runs import arithmetic
from covey.runs.arithmetic import compute_as_run
from covey.runs.reader import load_run
from covey.system.console import RunConsole
from covey.training.options import RunOptions
from covey.training.pipeline import run_pipeline

REWARDS = """
def brief(completion, answer):
    return float(len(completion) < 12)
"""
CONFIG = {
    "model": "tiny",
    "data": {"train": "train.jsonl", "test": "test.jsonl"},
    "rewards": ["rewards.py:brief"],
    "rollout": {"group_size": 4, "prompts_per_step": 4, "max_tokens": 8},
    "train": {"steps": 4, "lr": 0.01, "save_every": 2},
    "eval": {"problems": 8, "samples": 2},
    "threads": 1,
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in ("train", "test"):
        rows = [{"prompt": f"{i}+1=", "answer": str(i + 1), "completion": str(i + 1)} for i in range(12)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "rewards.py").write_text(REWARDS)
    return tmp_path


def trained(project: Path, stop_at: int = 0, **changes: object) -> Path:
    """The folder of a run that was started from a file of the project."""
    output = project / "run"
    (project / "run.yaml").write_text(yaml.safe_dump({**CONFIG, "output": str(output), **changes}))
    resolved = load_config(project / "run.yaml")
    if stop_at:
        with pytest.raises(Stopped):
            run_pipeline(resolved, RunConsole(quiet=True), StopAt(stop_at))
    else:
        run_pipeline(resolved, RunConsole(quiet=True), StopAt())
    return output


def measured(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    capsys.readouterr()
    assert main(["eval", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def logged(folder: Path, at: int) -> dict:
    record = json.loads((folder / "evals.jsonl").read_text().splitlines()[at])
    return {k: v for k, v in record.items() if k not in ("step", "sha256")}


def test_a_run_is_measured_by_its_final_model(project: Path, capsys, monkeypatch) -> None:
    folder = trained(project)
    (project / "elsewhere").mkdir()
    monkeypatch.chdir(project / "elsewhere")
    found = measured(capsys, folder)
    assert found == logged(folder, -1)
    assert found["outcome"] != logged(folder, 0)["outcome"]
    assert measured(capsys, project / "run.yaml") == logged(folder, 0)
    assert measured(capsys, folder, "--model", "tiny") == logged(folder, 0)
    assert main(["check", str(folder), "--json"]) == 0


def test_rows_that_the_run_has_left_out_are_not_measured(project: Path, capsys) -> None:
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1) if i else "?"} for i in range(12)]
    (project / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    scoring = {"max_bad_references": 0.5}
    folder = trained(project, method="sft", rewards=["math_answer"], scoring=scoring, algorithm="dapo")
    assert measured(capsys, folder) == logged(folder, -1)


@pytest.mark.parametrize(("lora", "lr"), [(None, 0.01), ({"rank": 2}, 0.5)], ids=["whole", "lora"])
def test_a_run_that_has_not_ended_by_its_newest_checkpoint(
    project: Path, capsys, lora: dict | None, lr: float
) -> None:
    # Draws are keyed, so lengths stay when weights move a little; letters do not.
    rewards = REWARDS.replace("len(completion) < 12", "sum(map(ord, completion)) % 2")
    (project / "rewards.py").write_text(rewards)
    folder = trained(project, stop_at=100, lora=lora, train={**CONFIG["train"], "lr": lr})
    step = max(p.name for p in (folder / "checkpoints").iterdir())
    found = measured(capsys, folder)
    assert main(["eval", str(folder)]) == 0
    assert f"has not ended: this is {step}" in capsys.readouterr().err
    resolved = load_run(folder)
    assert (resolved.checkpoint is None) == (lora is None)  # whole, it is a model as any other
    assert found == evaluate_once(resolved, RunConsole(quiet=True)).record()
    assert found["outcome"] != logged(folder, 0)["outcome"]


@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["whole", "lora"])
def test_a_checkpoint_that_its_run_removes_meanwhile_is_not_missed(
    project: Path, capsys, monkeypatch, lora: dict | None
) -> None:
    folder = trained(project, stop_at=200, lora=lora, train={**CONFIG["train"], "save_every": 1})
    first, second = sorted((folder / "checkpoints").iterdir())
    away, newest = project / "away", measured(capsys, folder)

    def removed_before(module: str, name: str) -> None:
        """The run saves its second checkpoint and removes its first when a function is first called."""
        if away.exists():
            away.rename(first)
        second.rename(project / "later")
        function, waiting = getattr(importlib.import_module(module), name), [True]

        def late(*arguments: object, **named: object) -> object:
            if waiting and waiting.pop():
                first.rename(away)
                (project / "later").rename(second)
            return function(*arguments, **named)

        monkeypatch.setattr(f"{module}.{name}", late)

    removed_before("covey.commands.inference", "load_policy")
    assert main(["eval", str(folder)]) == 0
    said = capsys.readouterr()
    assert f"has not ended: this is {first.name}" in said.err
    assert f"the running run has removed {first.name}: this is {second.name}" in said.out
    removed_before("covey.proof.check", "scratch_run")
    assert main(["check", str(folder)]) == 0
    removed_before("covey.runs.folder", "damage")
    assert measured(capsys, folder) == newest


def test_a_pipeline_by_its_last_stage(project: Path, capsys) -> None:
    folder = trained(project, stages=[{"method": "sft", "train": {"lr": 1e-4}}, {"method": "rl"}])
    assert measured(capsys, folder) == logged(folder / "2-rl", -1)
    assert measured(capsys, folder / "1-sft") == logged(folder / "1-sft", -1)


def test_folders_without_a_run_or_a_model_are_answered(project: Path, capsys) -> None:
    assert main(["eval", str(project)]) == 2
    assert "this folder has no run" in capsys.readouterr().err
    folder = trained(project)
    (folder / "final").rename(project / "gone")
    for checkpoint in (folder / "checkpoints").iterdir():
        (checkpoint / "manifest.json").unlink()
    assert main(["eval", str(folder)]) == 2
    assert "no model yet" in capsys.readouterr().err


def test_a_project_that_has_moved_is_looked_for_here(
    project: Path, tmp_path_factory, capsys, monkeypatch
) -> None:
    trained(project)
    moved = tmp_path_factory.mktemp("new") / "project"
    project.rename(moved)
    monkeypatch.chdir(moved)
    assert main(["eval", "run"]) == 0
    assert "is gone: relative paths are from" in capsys.readouterr().err


DATED = CHAT_TEMPLATE.replace("{% for m in", "{{ strftime_now('%d %b %Y') }}\n{% for m in", 1)


class Day(datetime):
    """A clock that is moved by hand."""

    today_is = datetime(2026, 11, 25, 23, 50)

    @classmethod
    def now(cls, tz: object = None) -> datetime:
        return cls.today_is


def test_a_template_that_prints_the_date_is_given_that_of_the_run(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Continued on another day, strictly, a run ends as it would have, and so does its evaluation."""
    tokenizer = build_tokenizer(["25 Nov 2026 Mon Tue 1+2=3", "user assistant"])
    tokenizer.chat_template = DATED
    build_model(tokenizer, 0, context=512, hidden=32, layers=1).save_pretrained(project / "model")
    tokenizer.save_pretrained(project / "model")
    changes = {"model": "model", "data": {**CONFIG["data"], "chat": True}}
    for module in (chat, arithmetic):
        monkeypatch.setattr(module, "datetime", Day)
    monkeypatch.setattr(Day, "today_is", datetime(2026, 11, 25, 23, 50))
    whole = trained(project, **changes).rename(project / "whole")
    run = trained(project, stop_at=2, **changes)
    monkeypatch.setattr(Day, "today_is", datetime(2026, 12, 9, 8, 0))
    resolved = load_config(project / "run.yaml")
    run_pipeline(resolved, RunConsole(), StopAt(), RunOptions(strict=True))
    said = " ".join(capsys.readouterr().out.split())
    assert "prints the date" in said
    assert "2026-11-25" in said
    weights = [(folder / "final" / "model.safetensors").read_bytes() for folder in (whole, run)]
    assert weights[0] == weights[1]
    with compute_as_run(run, torch.device("cpu")):
        problem = [{"role": "user", "content": "1+1="}]
        assert "25 Nov 2026" in chat.chat_text(tokenizer, problem, {})
