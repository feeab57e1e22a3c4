"""The parent of every command: what a user's process does when something ends it, or its output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from covey.cli import main

REWARDS = """
from covey import reward

import ctypes, os, time
calls = [0]

def varied(completion):
    return len(completion) + sum(map(ord, completion)) % 7

@reward(isolate="inline")
def leaves(completion):
    calls[0] += 1
    return varied(completion) if calls[0] < 30 else os._exit(0)

@reward(isolate="inline")
def crashes(completion):
    calls[0] += 1
    return varied(completion) if calls[0] < 30 else ctypes.string_at(0)

def slow(completion):
    time.sleep(0.05)
    return varied(completion)
"""
# A command that takes its time, in place of the command line: the parent does not know the difference.
COMMAND = """
import os, sys, time, types

def main(arguments):
    {work}

sys.modules["covey.cli"] = types.SimpleNamespace(main=main)
from covey.__main__ import main as supervised
sys.exit(supervised())
"""
WAITS = "print(os.getpid(), flush=True); time.sleep(60)"
LISTENS = """
    from covey.system.signals import StopSignal
    with StopSignal().listening() as stop:
        print(os.getpid(), flush=True)
        while stop.reason is None:
            time.sleep(0.01)
        print(stop.reason, flush=True)
        time.sleep(arguments and 60 or 1)
    return 75
"""


def command(work: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """A supervised command in a process group of its own, ready when this returns."""
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND.format(work=work), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    return process


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "rewards.py").write_text(REWARDS)
    return tmp_path


def config(project: Path, reward: str = "varied", **train: object) -> str:
    settings = {
        "output": str(project / "run"),
        "data": {"task": "last_digit", "train_size": 64, "test_size": 8},
        "rewards": [f"rewards.py:{reward}"],
        "rollout": {"group_size": 4, "prompts_per_step": 4, "max_tokens": 8},
        "train": {"steps": 3, "lr": 1e-3, "save_every": 50, **train},
        "eval": {"problems": 4, "samples": 1},
        "threads": 1,
    }
    (project / "run.yaml").write_text(yaml.safe_dump(settings))
    return str(project / "run.yaml")


def covey(*arguments: str) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-m", "covey", *arguments], **pipes)


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        ("leaves", "exited with code 0 before it returned a result"),
        ("crashes", "killed by SIGSEGV"),
    ],
)
def test_a_run_without_a_result_never_ends_with_0(project: Path, reward: str, says: str) -> None:
    process = covey("train", config(project, reward), "--json")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 5
    assert says in err.strip().splitlines()[-1]
    assert f"covey resume {project / 'run'}" in err
    assert json.loads(out)["exit_code"] == 5
    assert json.loads((project / "run" / "exit.json").read_text())["exit_code"] == 5
    assert ("rewards.py" in err) == (reward == "crashes")  # the trace names the line


@pytest.mark.parametrize(
    "leaving",
    [
        "raise SystemExit(0)",
        "os._exit(0)",
        "os.execv('/bin/sh', ['sh', '-c', 'exit 0'])",
        "os.kill(os.getpid(), 11)",
        "1 / 0",
    ],
)
def test_no_command_is_ended_quietly_by_what_it_runs(leaving: str) -> None:
    process = command(f"print(flush=True); {leaving}")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 5
    assert err.strip().splitlines()[-1].startswith("error: the process ")


def test_a_reward_file_that_exits_is_named(project: Path, capsys) -> None:
    (project / "rewards.py").write_text("import sys\n\nsys.exit(0)\n")
    assert main(["train", config(project)]) == 5
    assert "rewards.py:3 ended the program (exit code 0)" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 75), ("SIGHUP", 75)])
@pytest.mark.parametrize("reach", [os.kill, os.killpg], ids=["parent", "group"])
def test_a_signal_before_the_work_begins_is_answered(
    name: str, code: int, reach: Callable[..., None]
) -> None:
    process = command(WAITS)
    reach(process.pid, signal.Signals[name])
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert err == f"error: stopped by {name}; there was nothing to save\n"


def test_nohup_is_respected() -> None:
    process = command(LISTENS, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    os.killpg(process.pid, signal.SIGHUP)
    os.killpg(process.pid, signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (75, "stopped by SIGTERM\n")


@pytest.mark.parametrize("reach", [os.kill, os.killpg], ids=["parent", "group"])
def test_one_signal_is_one_request_and_a_second_ends_at_once(reach: Callable[..., None]) -> None:
    """A terminal signals the whole group: the child by itself, and by its parent."""
    patient = command(LISTENS)
    reach(patient.pid, signal.SIGINT)
    out, _ = patient.communicate(timeout=60)
    assert (patient.returncode, out) == (75, "stopped by SIGINT\n")

    stuck = command(LISTENS, "for a minute")
    reach(stuck.pid, signal.SIGTERM)
    assert stuck.stdout is not None
    assert stuck.stdout.readline() == "stopped by SIGTERM\n"
    time.sleep(0.3)
    assert stuck.poll() is None
    reach(stuck.pid, signal.SIGINT)
    _, err = stuck.communicate(timeout=60)
    assert stuck.returncode == 130
    assert "stopped at once by SIGINT" in err


def test_who_kills_the_parent_kills_the_command() -> None:
    process = command(WAITS)
    process.kill()
    process.communicate(timeout=30)  # ends when nobody holds its output any more
    assert process.returncode == -signal.SIGKILL


def test_a_kill_of_the_child_is_seen_and_said() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND.format(work=WAITS)], stdout=-1, stderr=-1, text=True
    )
    assert process.stdout is not None
    os.kill(int(process.stdout.readline()), signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert "memory runs out" in err


def test_a_closed_terminal_saves_the_run(project: Path) -> None:
    process = covey("train", config(project, "slow", steps=50))
    while not (project / "run" / "metrics.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.02)
    for stream in (process.stdout, process.stderr):
        assert stream is not None
        stream.close()
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=60) == 75
    end = json.loads((project / "run" / "exit.json").read_text())
    assert "stopped by SIGHUP; saved after step" in end["error"]
    assert len(list((project / "run" / "checkpoints").iterdir())) == 1


def closed_pipe() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def full_disk() -> int:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    return os.open("/dev/full", os.O_WRONLY)


def printing_to(descriptor: int, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "covey", *arguments]
    done = subprocess.run(command, stdout=descriptor, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(descriptor)
    return done.returncode, done.stderr


@pytest.mark.parametrize("descriptor", [closed_pipe, full_disk])
def test_output_is_no_reason_to_stop(project: Path, descriptor: Callable[[], int]) -> None:
    code, err = printing_to(descriptor(), "train", config(project))
    assert code == 0
    assert err.splitlines() == [f"training, in {project / 'run'}: loading ..."]
    assert (project / "run" / "final" / "model.safetensors").exists()
    events = (project / "run" / "events.jsonl").read_text().splitlines()
    assert [json.loads(e)["event"] for e in events] == ["output lost"]


@pytest.mark.parametrize("arguments", [("algorithms", "--json"), ("explain",), ("--help",)])
@pytest.mark.parametrize(("descriptor", "code"), [(closed_pipe, 0), (full_disk, 8)])
def test_a_command_that_only_prints_ends_by_where_it_printed(
    arguments: tuple[str, ...], descriptor: Callable[[], int], code: int
) -> None:
    ended, err = printing_to(descriptor(), *arguments)
    assert ended == code
    assert err.startswith("error: standard output: No space left") if code else err == ""
