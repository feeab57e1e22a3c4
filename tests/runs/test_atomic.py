"""Writing whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from tests.fakes import group

from covey.errors import CheckpointError, FolderBusy, Stopped
from covey.runs.atomic import clear_killed, clear_leftovers, committed_folder, write_file
from covey.runs.folder import RunFolder
from covey.system.integrity import damage
from covey.system.signals import raising_stopped
from covey.types import SamplingMask


def write_two(target: Path, text: str) -> None:
    with committed_folder(target) as folder:
        (folder / "a.txt").write_text(text)
        (folder / "sub").mkdir()
        (folder / "sub" / "b.txt").write_text(text * 2)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_removes_what_is_half_written(tmp_path: Path, number: signal.Signals, code: int) -> None:
    before = signal.getsignal(number)
    with (
        pytest.raises(Stopped, match=f"stopped by {number.name}; nothing was written") as stopped,
        raising_stopped("nothing was written"),
        committed_folder(tmp_path / "x") as folder,
    ):
        (folder / "a.txt").write_text("half")
        os.kill(os.getpid(), number)
    assert stopped.value.code == code
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(number) == before


def written_by(code: str, target: Path) -> str:
    """The name of the temporary folder of a process that ended while it wrote, after it ran ``code``."""
    program = f"""
import os, pathlib, sys
from covey.runs.atomic import committed_folder
{code}
with committed_folder(pathlib.Path(sys.argv[1])) as folder:
    print(folder.name, flush=True)
    os._exit(0)
"""
    output = subprocess.run([sys.executable, "-c", program, target], check=True, capture_output=True)
    return output.stdout.decode().strip()


ELSEWHERE = "os.uname = lambda: os.uname_result(('Linux', 'another-machine', '', '', ''))"


def test_what_a_killed_writer_has_left_is_cleared_for_its_target_alone(tmp_path: Path) -> None:
    target = tmp_path / "x"
    written_by("", target)
    kept = {written_by("", tmp_path / "y"), ".tmp-x.mine"}
    (tmp_path / ".tmp-x.mine").mkdir()
    with committed_folder(target) as mine:
        clear_killed(target)
        assert {path.name for path in tmp_path.iterdir()} == {*kept, mine.name}
    clear_killed(tmp_path / "none" / "x")


def test_the_work_of_a_writer_on_another_machine_stays(tmp_path: Path) -> None:
    """On a shared file system its process cannot be seen: one of its number is here, or none."""
    target = tmp_path / "x"
    theirs = written_by(ELSEWHERE, target)
    write_two(target, "mine")
    clear_killed(target)
    assert {path.name for path in tmp_path.iterdir()} == {theirs, "x"}
    same_number = f"{ELSEWHERE}\nos.getpid = lambda: {os.getpid()}"
    other = written_by(same_number, tmp_path / "z")
    write_two(tmp_path / "z", "mine")
    assert (tmp_path / other).is_dir()
    clear_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"x", "z"}


def test_a_committed_folder_replaces_the_old_one_and_is_intact(tmp_path: Path) -> None:
    write_two(tmp_path / "x", "old")
    write_two(tmp_path / "x", "new")
    assert (tmp_path / "x" / "sub" / "b.txt").read_text() == "newnew"
    assert damage(tmp_path / "x") is None
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_an_error_inside_leaves_what_was_there(tmp_path: Path) -> None:
    write_two(tmp_path / "x", "old")
    with pytest.raises(RuntimeError), committed_folder(tmp_path / "x") as folder:
        (folder / "a.txt").write_text("half")
        raise RuntimeError
    assert (tmp_path / "x" / "a.txt").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("file", ["a.txt", "sub/b.txt", "manifest.json"])
@pytest.mark.parametrize("how", ["removed", "truncated", "flipped"])
def test_every_damage_is_found_and_named(tmp_path: Path, file: str, how: str) -> None:
    write_two(tmp_path / "x", "text")
    path = tmp_path / "x" / file
    content = bytearray(path.read_bytes())
    if how == "removed":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    complaint = damage(tmp_path / "x")
    assert complaint is not None
    assert str(path) in complaint or file == "manifest.json"


def test_leftovers_of_dead_writers_are_cleared(tmp_path: Path) -> None:
    (tmp_path / ".tmp-step_000001.99").mkdir()
    (tmp_path / ".tmp-config.yaml.99").write_text("half")
    write_file(tmp_path / "config.yaml", "whole")
    clear_leftovers(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["config.yaml"]


def _open(path: Path, queue) -> None:
    try:
        RunFolder(path)
    except FolderBusy as error:
        queue.put(str(error))


def test_two_processes_cannot_work_in_one_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with pytest.raises(FolderBusy, match=f"process {os.getpid()} on .* is using this folder"):
        RunFolder(tmp_path)  # nor can this one work there twice
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    other = context.Process(target=_open, args=(tmp_path, queue))
    other.start()
    assert "is using this folder" in queue.get(timeout=60)
    other.join()
    folder.close()
    RunFolder(tmp_path).close()


HOLDER = """
import sys, time
from pathlib import Path
from covey.runs.folder import RunFolder
RunFolder(Path(sys.argv[1]))
print("holds", flush=True)
time.sleep(600)
"""


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"holds\n"
        with pytest.raises(FolderBusy, match=f"process {holder.pid} on "):
            RunFolder(tmp_path)
        holder.kill()
    RunFolder(tmp_path).close()


def test_a_folder_is_closed_by_any_thread(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    thread = Thread(target=folder.close)
    thread.start()
    thread.join()
    RunFolder(tmp_path).close()


def test_a_forked_child_does_not_release_what_its_parent_holds(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    child = os.fork()
    if not child:
        try:
            folder.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(FolderBusy):
        RunFolder(tmp_path)
    folder.close()


def test_a_forked_child_that_outlives_a_run_does_not_hold_its_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    context = multiprocessing.get_context("fork")
    ends = context.Event()
    child = context.Process(target=ends.wait)
    child.start()
    with pytest.raises(FolderBusy, match=f"process {os.getpid()} on"):
        RunFolder(tmp_path)
    folder.close()
    RunFolder(tmp_path).close()
    ends.set()
    child.join()


@pytest.mark.filterwarnings("ignore:flock not supported")
def test_a_file_system_without_locks_still_refuses_a_second_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")  # as Lustre answers without -o flock

    monkeypatch.setattr(fcntl, "flock", missing)
    folder = RunFolder(tmp_path)
    with pytest.raises(FolderBusy, match="is using this folder"):
        RunFolder(tmp_path)
    folder.close()
    RunFolder(tmp_path).close()


def test_streams_and_rollouts_rewind_to_a_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.append("metrics.jsonl", {"step": 0, "loss": float("nan")})
    sizes = folder.sync()
    folder.append("metrics.jsonl", {"step": 1, "loss": 2.0})
    for step in (1, 2):
        groups = [group([1, 0], [2, 3])]
        folder.write_rollouts(step, groups, [np.zeros(2), np.ones(3)])
    folder.rewind(sizes, step=1)
    assert folder.read("metrics.jsonl") == [{"step": 0, "loss": None}]
    assert sorted(p.name for p in (tmp_path / "rollouts").iterdir()) == [
        "step_000001.jsonl",
        "step_000001.npz",
    ]
    folder.close()


@pytest.mark.parametrize("left", [None, b"", b'{"step": 0'])
def test_a_stream_that_lacks_what_was_logged_before_is_named(tmp_path: Path, left: bytes | None) -> None:
    folder = RunFolder(tmp_path)
    folder.append("metrics.jsonl", {"step": 0, "loss": 1.0})
    sizes, path = folder.sync(), tmp_path / "metrics.jsonl"
    path.unlink() if left is None else path.write_bytes(left)
    with pytest.raises(CheckpointError, match=r"metrics.jsonl has \d+ bytes, but had 103 when .* step 1"):
        folder.damaged_streams(sizes, step=1)
    folder.close()


def test_the_rollout_log_holds_text_rewards_and_token_arrays(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    groups = [group([1, 0], [2, 3], "p"), group([0.5, 0.5], [1, 1], "q")]
    advantages = [np.full(n, a) for n, a in ((2, 0.5), (3, -0.5), (1, 0.0), (1, 0.0))]
    folder.write_rollouts(4, groups, advantages)
    lines = folder.read("rollouts/step_000004.jsonl")
    assert [(x["problem"], x["sample"], x["reward"], x["advantage"]) for x in lines[:2]] == [
        ("p", 0, 1.0, 0.5),
        ("p", 1, 0.0, -0.5),
    ]
    arrays = np.load(tmp_path / "rollouts" / "step_000004.npz")
    assert arrays["ends"].tolist() == [2, 5, 6, 7]
    assert arrays["advantages"].tolist() == [0.5] * 2 + [-0.5] * 3 + [0.0] * 2
    assert len(arrays["tokens"]) == len(arrays["logprobs"]) == 7
    first = (tmp_path / "rollouts" / "step_000004.npz").read_bytes()
    folder.write_rollouts(4, groups, advantages, filtered=[group([1, 1], [4, 2], "r")])
    lines = folder.read("rollouts/step_000004.jsonl")
    assert [(x["problem"], x["trained"]) for x in lines[2:]] == [("q", True)] * 2 + [("r", False)] * 2
    assert lines[-1]["advantage"] == 0.0
    arrays = np.load(tmp_path / "rollouts" / "step_000004.npz")
    assert arrays["ends"].tolist() == np.cumsum([x["tokens"] for x in lines]).tolist()
    assert arrays["advantages"][7:].tolist() == [0.0] * 6
    folder.write_rollouts(4, groups, advantages)
    assert (tmp_path / "rollouts" / "step_000004.npz").read_bytes() == first
    assert "kept_ids" not in arrays
    folder.close()


def test_the_rollout_log_holds_what_could_be_drawn(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    kept = [[[4, 5], [1]], [[7], [2, 3, 9], [0]]]
    trained, filtered = group([1, 0], [2, 3], "p"), group([1, 1], [2, 3], "r")
    masked = [
        replace(c, sampling_mask=SamplingMask.of([np.array(ids) for ids in sets]))
        for c, sets in zip(trained.completions, kept, strict=True)
    ]
    groups = [replace(g, completions=tuple(masked)) for g in (trained, filtered)]
    folder.write_rollouts(0, groups[:1], [np.ones(2), np.ones(3)], groups[1:])
    arrays = np.load(tmp_path / "rollouts" / "step_000000.npz")
    assert len(arrays["kept_ends"]) == len(arrays["tokens"]) == arrays["ends"][-1]
    sets = np.split(arrays["kept_ids"], arrays["kept_ends"][:-1])
    assert [s.tolist() for s in sets] == [ids for _ in range(2) for sets in kept for ids in sets]
    folder.close()


def test_a_file_behind_a_link_is_replaced_and_a_device_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "there.html").write_text("old")
    (tmp_path / "link.html").symlink_to("there.html")
    write_file(tmp_path / "link.html", "new")
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "there.html").read_text() == "new"
    reader, device = os.openpty()
    write_file(Path(os.ttyname(device)), "new")
    assert os.read(reader, 9) == b"new"
    assert Path(os.ttyname(device)).is_char_device()
    os.close(reader)
    os.close(device)


def test_a_file_that_cannot_be_written_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match=r"/taken'$"):
        write_file(tmp_path / "taken", "text")
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]


def test_a_child_of_a_users_does_not_hold_a_run_that_has_ended(tmp_path: Path) -> None:
    folder, (mine, its) = RunFolder(tmp_path / "run"), socket.socketpair()
    child = os.fork()
    if not child:
        its.sendall(b"runs")
        its.recv(1)
        os._exit(0)
    mine.recv(4)
    folder.close()
    RunFolder(tmp_path / "run").close()
    mine.sendall(b".")
    os.waitpid(child, 0)
    mine.close()
    its.close()
