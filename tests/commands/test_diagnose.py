"""`covey diagnose`: trials repeat the run from a checkpoint but for one change, and are compared with it."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from tests.training.runs import StopAt

from covey.cli import main
from covey.commands.diagnose import Plan, answers_of_others, diagnose, plan_trials
from covey.config.load import load_config
from covey.errors import Stopped
from covey.insight.findings.finding import Finding
from covey.insight.findings.settings import settings_of
from covey.insight.findings.watch import Explanation
from covey.insight.trials import (
    NOT_KNOWN,
    Change,
    TrialResult,
    changes_worth_trying,
    conclusion,
    helpful_trials,
)
from covey.runs.estimates import Estimate
from covey.runs.folder import read_numbers
from covey.system.console import RunConsole
from covey.system.signals import StopSignal
from covey_verify.errors import ConfigError

CONFIG = {
    "model": "tiny",
    "data": {"task": "last_digit", "train_size": 32, "test_size": 8},
    "rollout": {"group_size": 4, "prompts_per_step": 4, "max_tokens": 6, "max_resampling_rounds": 0},
    "train": {"steps": 6, "lr": 1e-3, "save_every": 2, "keep": 3, "schedule": "cosine"},
    "eval": {"problems": 8, "samples": 1},
    "guards": {"dead_steps": 0},
}
LUCK = """
def even(completion: str) -> float:
    return float(sum(completion.encode()) % 2 == 0)

def mine(completion: str, answer: str) -> float:
    return float((sum(completion.encode()) + int(answer)) % 2 == 0)

def belongs(completion: str, prompt: str, answer: str) -> float:
    return float(sum(map(int, filter(str.isdigit, prompt))) % 10 == int(answer)) + 0.01 * even(completion)
"""
"""Rewards that random completions get half of the time, without and with the answer; and one for rows."""


def trained(folder: Path, **more: object) -> Path:
    file = folder / "run.yaml"
    (folder / "luck.py").write_text(LUCK)
    rewards = [f"{folder / 'luck.py'}:even"]
    file.write_text(yaml.safe_dump({**CONFIG, "rewards": rewards, "output": str(folder / "run"), **more}))
    assert main(["train", str(file)]) in (0, 1)
    return folder / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("diagnosed"))


def logged(folder: Path) -> list[dict[str, float]]:
    return read_numbers(folder, "metrics.jsonl")


def content(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("start", [0, 2])
def test_an_unchanged_trial_repeats_the_run_and_leaves_it_alone(run: Path, start: int) -> None:
    before = content(run)
    plan = plan_trials(run, ["train.lr=0"], start, steps=2)
    diagnose(plan, RunConsole(quiet=True), StopSignal())
    assert content(run) == before
    # A schedule over all steps is part of it: the trial ends early, but is no shorter run.
    assert logged(plan.folder(None)) == logged(run)[: start + 2]
    changed = logged(plan.folder(plan.changes[0]))
    assert changed[:start] == logged(run)[:start]
    assert changed[start]["accuracy"] == logged(run)[start]["accuracy"], "the same draws"
    assert logged(plan.folder(plan.changes[0]))[-1] != logged(run)[start + 1], "the change acts"
    assert not (plan.folder(None) / "final").exists()


def test_the_same_command_makes_only_what_is_missing(run: Path, tmp_path: Path) -> None:
    plan = replace(plan_trials(run, ["train.lr=0", "train.lr=1e-4"], 2, steps=1), home=tmp_path)
    counter = StopAt()
    diagnose(plan, RunConsole(quiet=True), counter)
    done = {p: p.stat().st_mtime_ns for p in tmp_path.glob("*/result.json")}
    assert len(done) == 3
    diagnose(plan, RunConsole(quiet=True), StopSignal())
    assert {p: p.stat().st_mtime_ns for p in tmp_path.glob("*/result.json")} == done

    other = replace(plan, home=tmp_path / "stopped")
    with pytest.raises(Stopped, match="1 of 3 trials are complete; repeat the command to continue"):
        diagnose(other, RunConsole(quiet=True), StopAt(counter.checks // 2))
    trials, _ = diagnose(other, RunConsole(quiet=True), StopSignal())
    assert [logged(t.folder) for t in trials] == [logged(plan.folder(t.change)) for t in trials]


def test_a_user_reads_a_table_and_a_conclusion(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["diagnose", str(run), "--change", "train.lr=0", "--start", "4", "--steps", "1"]
    assert main(command) == 1
    printed = capsys.readouterr()
    assert "2 trials of 1 step that begin after 4 steps" in printed.err
    assert "train.lr: 0" in printed.out
    assert "no change does more than chance explains" in printed.out
    assert main([*command, "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["helping"] == []
    assert record["trials"][0]["effect"] == "no clear change"


@pytest.mark.parametrize(
    ("own", "start", "says"),
    [
        (["train.lr"], None, "write a setting and its value"),
        (["train.lrr=1"], None, "did you mean train.lr"),
        (["train.lr=x"], None, "valid number"),
        (["seed=4"], 2, "seed cannot change in the middle of a run: try it with --start 0"),
        ([], 3, "has checkpoints after 2, 4 steps"),
    ],
)
def test_nonsense_is_refused_before_the_first_trial(
    run: Path, own: list[str], start: int | None, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        plan_trials(run, own, start)


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        ("even", "^$"),
        ("mine", "no answer is correct yet, or answers do not belong to their prompts$"),
        (
            "belongs",
            r"0\.\d+ with the answers of other rows, 1 with their own .*: answers belong to their prompts$",
        ),
    ],
)
def test_what_the_answers_of_other_rows_would_earn_is_said(tmp_path: Path, reward: str, says: str) -> None:
    rewards = [f"{tmp_path / 'luck.py'}:{reward}"]
    plan = plan_trials(trained(tmp_path, rewards=rewards), ["train.lr=0"], 0, steps=5)
    diagnose(plan, RunConsole(quiet=True), StopSignal())
    assert re.search(says, answers_of_others(plan))


def test_only_reinforcement_is_diagnosed(tmp_path: Path) -> None:
    run = trained(tmp_path, method="sft", train={"steps": 1, "batch_size": 2}, rewards=[])
    with pytest.raises(ConfigError, match="needs a run of method rl, and this one has sft"):
        plan_trials(run)


def test_every_change_has_a_folder_of_its_own(run: Path) -> None:
    long = f"rewards: [{{math_answer: {{rule: {'x' * 100}"
    lines = ["train.lr: 0.1", "rewards: [a]", "rewards: {a}", f"{long}1", f"{long}2"]
    plan = replace(plan_trials(run, ["train.lr=0"], 0), home=Path("trials"))
    folders = {plan.folder(Change(line, "yours")) for line in lines}
    assert len(folders) == len(lines)
    assert Path("trials/train.lr=0.1") in folders


def test_a_trial_that_ends_early_is_a_result(run: Path, tmp_path: Path) -> None:
    # Random completions never have this form, so no weight changes, which a guard complains about.
    plan = replace(plan_trials(run, ["rewards=[answer_format]"], 0, steps=1), home=tmp_path)
    trials, _ = diagnose(plan, RunConsole(quiet=True), StopSignal())
    assert trials[0].ended == "stopped by a guard: trained 1 step without changing a single weight"
    assert trials[0].effect == "no clear change"
    # It is not made a second time.
    before = content(tmp_path)
    diagnose(plan, RunConsole(quiet=True), StopSignal())
    assert content(tmp_path) == before


def test_a_stage_of_a_pipeline_is_diagnosed_wherever_it_lies(tmp_path: Path) -> None:
    stages = [
        {"method": "sft", "train": {"steps": 1, "batch_size": 2}},
        {"method": "rl", "train": {"steps": 2, "save_every": 1}},
    ]
    trained(tmp_path, stages=stages).rename(tmp_path / "moved")
    plan = plan_trials(tmp_path / "moved", ["train.lr=0"], 1)
    assert plan.stage.name == "2-rl"
    trials, _ = diagnose(plan, RunConsole(quiet=True), StopSignal())
    assert logged(plan.folder(None)) == logged(plan.stage)
    assert trials[0].ended == ""


def test_trials_begin_before_the_trouble(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def planned(*findings: Finding) -> Plan:
        monkeypatch.setattr(
            "covey.commands.diagnose.explain_run", lambda _: Explanation(run, "", list(findings))
        )
        return plan_trials(run)

    severe, mild = Finding("farmed", 5, "severe", ""), Finding("flat", 2, "warning", "")
    assert planned(mild, severe).begun == 4
    assert planned(mild).begun == 0, "no checkpoint is as old as its step"
    assert planned().begun == 0, "without trouble the whole course is in question"
    assert planned(replace(severe, step=4)).begun == 2
    assert planned(replace(severe, step=4)).steps == 4, "no more than the run has left"


def test_settings_that_metrics_do_not_tell_apart_are_tried(run: Path, tmp_path: Path) -> None:
    sick = {
        **CONFIG,
        "algorithm": {"name": "grpo", "entropy": {"coef": 1.0}},
        "lora": {"rank": 8, "alpha": 0.5},
    }
    resolved = load_config(values={**sick, "output": str(tmp_path)})
    lines = [c.line for c in changes_worth_trying(run, [], settings_of(resolved), seed=3)]
    assert "algorithm.entropy.coef: 0.001" in lines
    assert "lora.alpha: 16.0" in lines
    assert lines[-1] == "seed: 4"
    assert "train.lr: 0.03" not in lines, "this policy moved"
    # A finding's own remedies come first.
    found = [Finding("wide_ratios", 3, "warning", "")]
    first = changes_worth_trying(run, found, settings_of(resolved), seed=3)[0]
    assert first.why == "wide_ratios"


def trial(line: str, low: float, high: float, *findings: str, why: str = "rate") -> TrialResult:
    gained = Estimate((low + high) / 2, low, high)
    return TrialResult(Change(line, why), Path(), NOT_KNOWN, gained, findings, "")


def test_what_helps_beyond_chance_is_named() -> None:
    good = trial("train.lr: 1e-6", 0.1, 0.3)
    weak = trial("train.lr: 3e-6", -0.1, 0.2)
    bad = trial("train.lr: 1e-3", -0.5, -0.2)
    order = trial("seed: 1", 0.3, 0.5, why="chance")
    assert [t.effect for t in (good, weak, bad)] == ["helps", "no clear change", "harms"]
    assert helpful_trials([weak, bad, good, order]) == [good]
    assert conclusion([weak, good], ["farmed"]).startswith("train.lr: 1e-6 helps: +20 points [+10, +30]")
    assert conclusion([weak, good], ["farmed"]).endswith(
        "farmed does not occur under train.lr: 3e-6, train.lr: 1e-6"
    )
    assert conclusion([weak, bad], ["farmed"]) == "farmed does not occur under train.lr: 3e-6"
    assert "farmed comes and goes by chance" in conclusion(
        [weak, replace(order, training=NOT_KNOWN)], ["farmed"]
    )
    assert "more than chance explains" in conclusion([weak, bad], [])
    # What the config points to comes before a rate that does a little more, but not before one that does far
    # more.
    alpha = trial("lora.alpha: 16.0", 0.1, 0.2, why="out of range")
    better = trial("train.lr: 0.03", 0.15, 0.25)
    assert helpful_trials([better, alpha]) == [alpha, better]
    assert helpful_trials([trial("train.lr: 0.03", 0.5, 0.7), alpha])[-1] is alpha
    assert conclusion([better, alpha], []).endswith(". train.lr: 0.03 helps too")
    # One comparison that is clearly worse outweighs another that is better.
    both = replace(good, held_out=Estimate(-0.2, -0.3, -0.1))
    assert both.effect == "harms"
    assert math.isnan(NOT_KNOWN.value)
