"""How `covey train` ends: exit codes, the last line, exit.json, and the command that continues."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

import covey
from covey.cli import main
from covey.errors import GuardStop
from covey.system.integrity import SEAL, sealed

REWARDS = """
import os
import time

def nothing(completion):
    return 0.0

def varied(completion):
    return len(completion) + sum(map(ord, completion)) % 7

def slow(completion):
    time.sleep(0.02)
    return varied(completion)

calls = []

def leaves(completion):
    calls.append(completion)
    if len(calls) == 30:
        os._exit(0)
    return varied(completion)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "rewards.py").write_text(REWARDS)
    write(tmp_path)
    return tmp_path


def write(project: Path, reward: str = "varied", **train: object) -> None:
    config = {
        "output": str(project / "run"),
        "data": {"task": "last_digit", "train_size": 64, "test_size": 8},
        "rewards": [f"rewards.py:{reward}"],
        "scoring": {"timeout": 0.3},
        "rollout": {"group_size": 4, "prompts_per_step": 4, "max_tokens": 12},
        "train": {"steps": 4, "lr": 1e-3, "save_every": 1, **train},
        "eval": {"problems": 4, "samples": 1},
        "threads": 1,
    }
    (project / "run.yaml").write_text(yaml.safe_dump(config))


def train(project: Path, *options: str) -> int:
    return main(["train", str(project / "run.yaml"), *options])


def last(project: Path) -> dict:
    return json.loads((project / "run" / "exit.json").read_text())


def test_a_run_that_ended_early_says_why_wherever_it_is_looked_at(project: Path, capsys) -> None:
    write(project, "nothing", steps=2)
    assert train(project) == 6
    run, report = str(project / "run"), project / "report.html"
    for words in (["explain", run], ["show", run], ["explain", run, "--json"], ["show", run, "--json"]):
        capsys.readouterr()
        assert main(words) == 0
        said = capsys.readouterr().out
        assert "without changing a single weight" in said
        assert "stopped by a guard" in said
        assert "Continue with" not in said, "the same steps would lead to the same end"
        assert "nothing stands out" not in said
    assert main(["report", run, "-o", str(report)]) == 0
    assert "without changing a single weight" in report.read_text()


def test_a_run_from_python_leaves_its_end_too(project: Path) -> None:
    write(project, "nothing", steps=2)
    with pytest.raises(GuardStop):
        covey.train(project / "run.yaml", quiet=True)
    assert last(project)["exit_code"] == 6
    covey.resume(project / "run", quiet=True, rewards=["rewards.py:varied"], train={"steps": 3})
    assert not (project / "run" / "exit.json").exists()


def test_a_reward_that_ends_its_interpreter_does_not_end_the_run(project: Path, capsys) -> None:
    write(project, "leaves")
    assert train(project) == 0
    assert "reward leaves" in (said := capsys.readouterr().err) and "it ended its own process" in said
    assert len((project / "run" / "metrics.jsonl").read_text().splitlines()) == 4
    assert (project / "run" / "final" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("inject", "code", "says"),
    [
        # A failing reward costs its completions as long as it is rare...
        ("reward.hang@30", 0, "model"),
        ("reward.raise@30", 0, "model"),
        ("reward.exit@30", 0, "model"),
        ("reward.none@30", 0, "model"),
        # ... ends the run when it is not, and at once when the function breaks its contract.
        ("reward.raise@30-999", 5, "could not be judged (scoring.max_infra 0.2)"),
        ("reward.exit@30-999", 5, "SystemExit"),
        ("reward.raise@1", 5, ": RuntimeError: a failure on purpose"),
        ("reward.hang@1", 5, "no answer within 0.3 s"),
        ("reward.inf@30", 5, "not a finite number or None"),
        ("reward.text@30", 5, "returned str 'good'"),
        ("reward.count@30", 5, "returned list"),
        ("grad.nan@2", 0, "model"),
        ("grad.nan@1-3", 6, "was not finite"),
        ("loss.nan@1-3", 6, "was not finite"),
        ("weights.nan@2", 6, "nothing was written"),
        ("memory.full@2", 0, "model"),
        ("memory.full@1-99", 8, "even with one completion at a time"),
        ("memory.sampling@9", 0, "model"),
        ("memory.sampling@9-99", 8, "while sampling, even with one completion at a time"),
        ("save.enospc@2", 8, "No space left on device. Free some space"),
        ("save.eio@2", 8, "Input/output error. Check the disk"),
        ("save.full@2", 8, "but only 0 are free. Free some space"),
        ("step.sigterm@3", 75, "stopped by SIGTERM; saved after step 2 of 4"),
    ],
)
def test_every_failure_has_its_end(project: Path, capsys, inject: str, code: int, says: str) -> None:
    assert train(project, "--inject", inject) == code
    out, err = capsys.readouterr()
    assert says in (err.strip().splitlines()[-1] if code else out)
    assert "a bug in covey" not in err
    if inject.endswith("@1"):
        assert not (project / "run").exists()  # found in the rehearsal, before anything was begun
    elif code:
        assert last(project)["exit_code"] == code
        assert last(project)["resume_command"] == f"covey resume {project / 'run'}"
    else:
        assert not (project / "run" / "exit.json").exists()


@pytest.mark.parametrize("inject", ["grad.nna@3", "grad.nan", "grad.nan@0", "reward", "grad.nan@x"])
def test_a_mistake_in_inject_is_answered(project: Path, capsys, inject: str) -> None:
    assert train(project, "--inject", inject) == 2
    assert "--inject" in capsys.readouterr().err
    assert not (project / "run").exists()


def test_resume_gives_the_same_command_again(project: Path, capsys, monkeypatch) -> None:
    assert train(project, "--train.lr", "5e-4", "--inject", "step.sigterm@3") == 75
    assert f"Continue with: covey resume {project / 'run'}" in capsys.readouterr().err
    monkeypatch.chdir(project.parent)  # from anywhere
    assert main(["resume", str(project / "run")]) == 0
    assert "resuming after step 2 of 4" in capsys.readouterr().out
    assert "lr: 0.0005" in (project / "run" / "config.yaml").read_text()
    assert main(["resume", str(project)]) == 2
    assert "this folder has no run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("save_every", "says"),
    [(10, "2 steps were not saved; repeating from step 1"), (1, "resuming after step 2 of 4")],
)
def test_after_a_kill_the_run_says_which_steps_it_repeats(
    project: Path, capsys, save_every: int, says: str
) -> None:
    write(project, save_every=save_every)
    command = [sys.executable, "-m", "covey", "train", str(project / "run.yaml"), "--inject", "step.kill@3"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == -signal.SIGKILL
    assert train(project) == 0
    out = capsys.readouterr().out
    assert says in out
    assert ("not saved" in out) == (save_every > 1)


def test_changes_are_shown_judged_and_need_resume(project: Path, capsys) -> None:
    assert train(project, "--inject", "step.sigterm@3") == 75
    assert train(project, "--train.lr", "0.5") == 2
    assert "train.lr is 0.001 there, 0.5 here (breaks exactness)" in capsys.readouterr().err
    assert train(project, "--train.keep", "9", "--inject", "step.sigterm@1") == 75
    assert "train.keep is 2 there, 9 here (safe)" in capsys.readouterr().out
    run = str(project / "run")
    assert main(["resume", run, "--seed", "3"]) == 2
    assert "seed is 0 there, 3 here (refused)" in capsys.readouterr().err
    assert main(["resume", run, "--train.lr", "2e-3", "--strict"]) == 4
    assert "remove --strict" in capsys.readouterr().err
    assert main(["resume", run, "--train.lr", "2e-3"]) == 0
    assert "train.lr is 0.001 there, 0.002 here (breaks exactness)" in capsys.readouterr().out
    events = (project / "run" / "events.jsonl").read_text()
    assert "no longer exact" in events


def test_another_machine_is_noticed(project: Path, capsys) -> None:
    assert train(project, "--inject", "step.sigterm@3") == 75
    path = project / "run" / "env.json"
    recorded = {k: v for k, v in json.loads(path.read_text()).items() if k != SEAL}
    path.write_text(sealed({**recorded, "torch": "1.0", "data": "other"}))
    assert train(project, "--strict") == 4
    err = capsys.readouterr().err
    assert "torch is 1.0 there" in err
    assert "data changed since the run began" in err
    assert train(project) == 0
    assert "torch is 1.0 there" in capsys.readouterr().out


def test_what_is_no_longer_exact_stays_said_where_the_next_checkpoint_was_not_reached(project: Path) -> None:
    assert train(project, "--inject", "step.sigterm@3") == 75
    (project / "rewards.py").write_text(REWARDS.replace("% 7", "% 5"))
    assert main(["resume", str(project / "run"), "--inject", "step.sigterm@1"]) == 75
    assert main(["resume", str(project / "run")]) in (0, 1)
    events = [json.loads(line) for line in (project / "run" / "events.jsonl").read_text().splitlines()]
    because = [e["because"] for e in events if e["event"] == "no longer exact"]
    assert because == [["rewards.py changed since the run began (breaks exactness)"]]


def test_a_second_command_in_the_same_folder_is_refused(project: Path, capsys) -> None:
    from covey.runs.folder import RunFolder

    assert train(project, "--inject", "step.sigterm@3") == 75
    folder = RunFolder(project / "run")
    assert train(project) == 4
    assert "is using this folder" in capsys.readouterr().err
    assert last(project)["exit_code"] == 75  # the other's record is left alone
    folder.close()


@pytest.mark.parametrize("theirs", ["metrics.jsonl", "final/weights.bin", "examples.jsonl"])
def test_files_that_no_run_has_left_are_not_overwritten(project: Path, capsys, theirs: str) -> None:
    file = project / "run" / theirs
    file.parent.mkdir(parents=True)
    file.write_text("precious")
    assert train(project) == 2
    assert f"{theirs.partition('/')[0]} but no record of a run" in capsys.readouterr().err
    assert [p for p in (project / "run").rglob("*") if p.is_file()] == [file]
    assert file.read_text() == "precious"
    file.rename(project / "run" / "notes.txt")
    if file.parent.name == "final":
        file.parent.rmdir()
    assert train(project) in (0, 1)


def spawn(project: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "covey", "train", str(project / "run.yaml"), *options]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def wait_for(path: Path) -> None:
    for _ in range(2400):  # a loaded machine takes long to start
        if path.exists():
            return
        time.sleep(0.05)
    raise AssertionError(path)


def test_a_stalled_process_ends_with_its_stacks(project: Path) -> None:
    process = spawn(project, "--inject", "step.hang@2", "--guards.stall_minutes", "0.02")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 7
    assert "no progress for 0.02 minutes" in err.strip().splitlines()[-1]
    assert "in hang" in (project / "run" / "stacks.txt").read_text()
    assert last(project)["exit_code"] == 7


def test_a_second_signal_exits_at_once(project: Path) -> None:
    process = spawn(project, "--inject", "step.hang@2")
    wait_for(project / "run" / "checkpoints" / "step_000001")
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    last_line = err.strip().splitlines()[-1]
    assert re.search(
        r"stopped at once by SIGINT; (nothing is lost|lost, since step \d+ was saved: .+)\.", last_line
    )
    assert last_line.endswith(f"Continue with: covey resume {(project / 'run').resolve()}")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_said(project: Path, capsys) -> None:
    (project / "run").mkdir(mode=0o500)
    assert train(project) == 8
    assert "may write to" in capsys.readouterr().err


def test_a_current_folder_that_is_gone_is_named(tmp_path: Path, monkeypatch, capsys) -> None:
    """`a file: No such file or directory. Check the disk` named neither."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["new", "task"]) == 2
    assert "the folder that the command was started in is gone" in capsys.readouterr().err


def test_errors_that_only_their_text_explains_are_understood() -> None:
    from covey.errors import as_error

    error = as_error(Exception("I/O error: No space left on device (os error 28)"))
    assert error.code == 8
    assert "Free some space" in str(error)
