"""Short forms of the campaigns in benchmarks/reliability, whose figures are in docs/reliability.md."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGNS = Path(__file__).parents[2] / "benchmarks" / "reliability"


def campaign(name: str, *options: str) -> dict:
    command = [sys.executable, "-W", "ignore", str(CAMPAIGNS / f"{name}.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.endswith("}\n"), done.stdout[-2000:] + done.stderr[-2000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["ok"] == (done.returncode == 0)
    return figures


def test_broken_configs_and_data_are_answered() -> None:
    assert campaign("fuzz", "--trials", "150", "--seed", "1")["tracebacks"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("signal", ["KILL", "TERM"])
def test_every_configuration_survives_signals(signal: str) -> None:
    figures = campaign("kills", "--kills", "12", "--signal", signal, "--configs", "plain", "critic", "stage")
    assert figures["identical"] == figures["runs"]


@pytest.mark.slow
def test_every_damaged_file_is_noticed() -> None:
    figures = campaign("disk", "damage")
    assert figures["cases"] == figures["noticed and named"] == figures["fell back, identical"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
@pytest.mark.parametrize("kind", ["calls", "errors"])
def test_every_file_system_call_may_be_the_last(kind: str) -> None:
    figures = campaign("disk", kind, "--every", "16")
    assert figures["identical"] == figures["points"] > 10


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_the_power_may_go_at_any_time() -> None:
    figures = campaign("power", "--every", "32")
    assert figures["identical"] == figures["states"] > 10


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        ("clock jumps by days", "another time zone", "folder moved", "two at once"),
        ("full disk", "read-only file system", "64 open files", "no network", "no HOME", "locale C"),
        ("stopped and continued", "verifiers killed", "odd letters in paths", "a path that is not UTF-8"),
    ],
    ids=lambda names: names[0],
)
def test_what_surrounds_a_run_changes_no_bit(names: tuple[str, ...]) -> None:
    assert {*campaign("surroundings", *names)["found"].values()} <= {"ok", "left out: its tool is missing"}


@pytest.mark.slow
def test_a_longer_run_keeps_no_file_and_no_thread() -> None:
    figures = campaign("same_bits", "soak", "--steps", "200")
    for what in ("open files", "threads"):
        low, high = figures[what].split(" to ")
        assert low == high


@pytest.mark.slow
def test_threads_and_workers_change_no_bit() -> None:
    assert campaign("same_bits", "hashes")["ok"]
