"""`covey show`, `diff` and `explain` of runs that other frameworks have made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from covey.audit.views import with_prompts_of_first
from covey.cli import main
from tests.audit.recorded import MISTAKES, run
from tests.audit.stand_ins import OpenRlhfTrainer, VerlTrainer


@pytest.fixture
def verl(tmp_path: Path) -> Path:
    run(VerlTrainer(), tmp_path)
    return (tmp_path / "run.jsonl").rename(tmp_path / "verl.jsonl")


def shown(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> str:
    assert main([str(word) for word in words]) == code
    said = capsys.readouterr()
    return said.err if code else said.out


def test_a_record_is_shown_as_a_run_is(verl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    course = shown(capsys, "show", verl)
    assert "verl.jsonl (verl): 4 updates" in course and "step  reward  dead  tokens" in course
    assert f"completions: covey show {verl} STEP, of 1 to 4" in course
    assert "6 groups, rewards 0 to" in shown(capsys, "show", verl, 2)
    group = json.loads(shown(capsys, "show", verl, 2, 1, "--json"))["completions"]
    rewards = [row["reward"] for row in group]
    assert rewards == sorted(rewards, reverse=True) and len(group) == 4
    # Of four completions the best one is above its group, and has an advantage.
    assert group[0]["advantage"] > 0 > group[-1]["advantage"]
    assert "tokens, stop; score" in shown(capsys, "show", verl, 2, 1)
    assert "no completions of step 9; it has 1 to 4" in shown(capsys, "show", verl, 9, code=2)
    assert "step 2 has no group 9" in shown(capsys, "show", verl, 2, 9, code=2)


def test_two_frameworks_are_compared_on_the_problems_of_both(
    verl: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(OpenRlhfTrainer(), tmp_path)
    said = shown(capsys, "diff", verl, tmp_path / "run.jsonl")
    assert "A: " in said and "(openrlhf)" in said and "A reward" in said
    assert "problems that both met, B - A" in said
    # Texts and scores alone, with the prompt in another template.
    record = [json.loads(line) for line in verl.read_text().splitlines()]
    dumped = [
        {"input": f"<user>{s['prompt']}</user>", "output": s["text"], "score": s["reward"] + 1.0}
        for line in record
        if line.get("kind") == "rollout"
        for s in line["completions"]
    ]
    (tmp_path / "dump").mkdir()
    (tmp_path / "dump/1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in dumped))
    found = json.loads(shown(capsys, "diff", verl, tmp_path / "dump", "--json"))
    assert found["training"]["value"] == pytest.approx(1.0)
    assert "    0" in shown(capsys, "show", tmp_path / "dump", 1)


def test_explain_says_of_a_record_what_the_audit_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = VerlTrainer()
    MISTAKES["mask_shifted"](trainer)
    run(trainer, tmp_path)
    said = shown(capsys, "explain", tmp_path / "run.jsonl")
    assert "step 1: the mask is shifted by one place" in said and "response_mask = attention_mask" in said


@pytest.mark.parametrize("command", ["show", "explain", "audit"])
def test_a_config_in_the_place_of_a_run_is_named(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("model: tiny\n")
    said = shown(capsys, command, config, code=2)
    assert f"{config} is a config, not a run" in said and f"covey preview {config}" in said


def test_two_rollouts_before_one_update_are_one_step(
    verl: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.loads(line) for line in verl.read_text().splitlines()]
    second = next(line for line in lines if line.get("number") == 1)
    second["step"] = 0
    verl.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "step 1: 12 groups" in shown(capsys, "show", verl, 1)


def test_prompts_are_the_same_problem_only_as_whole_words() -> None:
    ours = {"2+3=": 0.1, "7*8=": 0.2, "1+1=": 0.3}
    theirs = {"12+3=": 1.0, "user\n7*8=\nassistant\n": 0.9, "1+1=": 0.8, "Q: 1+1= A:": 0.7}
    _, renamed = with_prompts_of_first([ours, theirs])
    assert renamed == {"12+3=": 1.0, "7*8=": 0.9, "1+1=": 0.8, "Q: 1+1= A:": 0.7}
