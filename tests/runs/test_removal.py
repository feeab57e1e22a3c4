"""Runs in the trash, and their tags: nothing else is moved, nothing is written elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from covey.errors import CheckpointError, FolderBusy
from covey.runs.folder import RunFolder
from covey.runs.removal import move_to_trash, put_back
from covey.runs.tags import TAGS, read_tags, write_tags
from covey.system.integrity import sealed_text
from covey_verify.errors import ConfigError

CONFIG = sealed_text("method: rl\ntrain: {steps: 2}\n")


def made(folder: Path) -> Path:
    """A run that has ended."""
    lock = RunFolder(folder)
    lock.append("metrics.jsonl", {"step": 0, "loss": 1.0})
    (folder / "config.yaml").write_text(CONFIG)
    lock.close()
    return folder


def test_a_run_goes_to_the_trash_and_comes_back(tmp_path: Path) -> None:
    run = made(tmp_path / "runs" / "one")
    write_tags(run, ["kept"])
    home, place = move_to_trash(run, tmp_path / "runs")
    assert home == run and not run.exists()
    assert place.parent == tmp_path / "runs" / ".trash" and (place / "metrics.jsonl").is_file()
    put_back(home, place)
    assert read_tags(run) == ["kept"]


def test_a_stage_takes_its_pipeline_along(tmp_path: Path) -> None:
    stages = [made(tmp_path / "demo" / name) for name in ("1-sft", "2-rl")]
    home, place = move_to_trash(stages[1], tmp_path)
    assert home == tmp_path / "demo" and not home.exists()
    assert (place / "1-sft" / "config.yaml").is_file()


def test_what_is_no_run_alone_is_not_moved(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    with_notes, other, outside, alone, foreign = (made(root / name) for name in ("a", "b", "c", "d", "e"))
    (with_notes / "notes.txt").write_text("mine")
    (other / "config.yaml").write_text(sealed_text("server: {port: 80}\n"))
    (foreign / "config.yaml").write_text(CONFIG.replace("rl", "x"))
    (root / "link").symlink_to(outside)
    (alone / "rollouts").rmdir()
    (alone / "rollouts").symlink_to(outside / "rollouts")
    for run, says in (
        (with_notes, "a/notes.txt, which no run writes"),
        (other, "b/config.yaml, which no run writes"),
        (root / "link", "not a folder below"),
        (alone, "d/rollouts, which no run writes"),
    ):
        with pytest.raises(ConfigError, match=says):
            move_to_trash(run, root)
    with pytest.raises(CheckpointError, match="not as it was written"):
        move_to_trash(foreign, root)
    with pytest.raises(ConfigError, match="not a folder below"):
        move_to_trash(outside, outside)
    with pytest.raises(ConfigError, match="not a folder below"):
        move_to_trash(outside, tmp_path / "elsewhere")
    assert sorted(p.name for p in root.iterdir()) == ["a", "b", "c", "d", "e", "link"]


def test_a_run_at_work_and_a_trash_that_is_a_link_stop_it(tmp_path: Path) -> None:
    run = made(tmp_path / "one")
    with_lock = RunFolder(run)
    with pytest.raises(FolderBusy, match="is using this folder"):
        move_to_trash(run, tmp_path)
    with_lock.close()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".trash").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is a link"):
        move_to_trash(run, tmp_path)
    assert run.is_dir() and not list((tmp_path / "elsewhere").iterdir())


def test_a_run_is_not_put_back_over_another(tmp_path: Path) -> None:
    home, place = move_to_trash(made(tmp_path / "one"), tmp_path)
    made(tmp_path / "one")
    with pytest.raises(ConfigError, match="exists again"):
        put_back(home, place)
    assert place.is_dir()


def test_tags_are_words_and_a_link_is_not_followed(tmp_path: Path) -> None:
    assert write_tags(tmp_path, [" paper", "baseline", "paper"]) == ["paper", "baseline"]
    assert read_tags(tmp_path) == ["paper", "baseline"]
    for wrong in (["a" * 41], ["\x1b[2J"], ["a,b"], [1], "word", [str(i) for i in range(21)]):
        with pytest.raises(ConfigError):
            write_tags(tmp_path, wrong)
    assert read_tags(tmp_path) == ["paper", "baseline"]
    write_tags(tmp_path, [])
    assert not (tmp_path / TAGS).exists()
    (tmp_path / "secret").write_text('["mine"]')
    (tmp_path / TAGS).symlink_to(tmp_path / "secret")
    assert read_tags(tmp_path) == []
    with pytest.raises(ConfigError, match="is a link"):
        write_tags(tmp_path, ["paper"])
    assert (tmp_path / "secret").read_text() == '["mine"]'
