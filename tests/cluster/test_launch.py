"""`covey launch`: files that a shell reads, and that start what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from covey.cli import main
from tests.cluster.small_run import write
from tests.training.runs import fingerprint

NAMES = ["torchrun.sh", "job.sbatch", "ray.sh"]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = write(tmp_path / "it's $(touch here)\n# a folder", train={"steps": 2, "lr": 1e-3})
    monkeypatch.chdir(path.parent)
    return Path(path.name)


def test_they_are_files_that_bash_reads(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", str(config), "--launch.processes", "2", "--nodes", "3"]) == 0
    for name in NAMES:
        assert subprocess.run(["bash", "-n", f"launch/{name}"], capture_output=True).stderr == b""
    assert capsys.readouterr().out.split()[::2] == NAMES
    slurm, ray = (Path(f"launch/{name}").read_text() for name in NAMES[1:])
    assert "#SBATCH --nodes=3\n" in slurm
    assert "--nproc-per-node 2 " in slurm
    assert "--launch.processes 6 --launch.samplers 0" in ray, "Ray is told of all machines' processes"
    said = subprocess.run(["bash", "launch/ray.sh"], capture_output=True, text=True)
    assert said.returncode == 2
    assert "on each of the others    ray.sh join ADDRESS" in said.stderr
    assert not Path("here").exists(), "a folder's name is not run"
    assert Path(".ray_token").stat().st_mode & 0o077 == 0
    assert len(Path(".ray_token").read_text()) == 64


def test_print_writes_nothing(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--print", str(config)]) == 0
    printed = capsys.readouterr().out
    assert [
        line.removeprefix("# --- ") for line in printed.splitlines() if line.startswith("# --- ")
    ] == NAMES
    assert main(["launch", str(config), "--print", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == NAMES
    assert not Path("launch").exists()
    assert main(["launch", str(config), "--nodes", "0"]) == 2


@pytest.mark.slow
def test_torchrun_trains_from_its_file(config: Path) -> None:
    told = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    assert main(["launch", str(config), "--launch.processes", "2", "--output", "runs/two"]) == 0
    done = subprocess.run(["bash", "launch/torchrun.sh"], env=told, capture_output=True, text=True)
    assert Path("runs/two/result.json").exists(), done.stderr
    command = [sys.executable, "-m", "covey", "train", str(config), "--launch.processes", "2"]
    subprocess.run([*command, "--output", "runs/same"], env=told, capture_output=True)
    assert fingerprint(Path("runs/two")) == fingerprint(Path("runs/same"))
