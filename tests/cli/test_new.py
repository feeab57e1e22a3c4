"""`covey new`: the task that it writes runs, and nothing of the user's is written over."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import yaml

from covey.cli import main


def python(folder: Path, *arguments: str) -> str:
    """What Python prints in a folder."""
    done = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_new_task_runs(tmp_path, monkeypatch, capsys) -> None:
    """Its rows, its tests and its config are used as its README says, with another model."""
    home = tmp_path / "my tasks" / "dates"
    assert main(["new", str(home), "--model", "tiny"]) == 0
    assert f"cd '{home}' && python rows.py" in capsys.readouterr().out
    python(home, "rows.py")
    options = ("-q", "-c", "/dev/null", "--rootdir", ".", "-p", "no:cacheprovider")
    assert re.search(r"^\d+ passed in", python(home, "-m", "pytest", *options), re.MULTILINE)
    monkeypatch.chdir(home)
    assert main(["stress", "run.yaml"]) == 1  # its reward pays parts of a date
    assert "attacks were paid" in capsys.readouterr().err


def test_a_hub_id_stands_in_the_config(tmp_path) -> None:
    assert main(["new", str(tmp_path / "task"), "--model", "owner/name"]) == 0
    assert yaml.safe_load((tmp_path / "task/run.yaml").read_text())["model"] == "owner/name"


def test_a_folder_with_files_is_left_alone(tmp_path, capsys) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["new", str(tmp_path)]) == 2
    assert main(["new", str(tmp_path / "notes.txt")]) == 2
    assert "name a folder that does not exist yet" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_a_full_disk_leaves_no_part_of_it(tmp_path) -> None:
    """Files may have one kilobyte here, and the command can be repeated where they may have more."""
    words = f"ulimit -f 1; {sys.executable} -m covey new task"
    ended = subprocess.run(["bash", "-c", words], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 8, ended.stderr
    assert ended.stderr.startswith("error: ")
    assert not list((tmp_path / "task").iterdir())
    assert main(["new", str(tmp_path / "task")]) == 0
