"""Child processes: no end is misnamed, and none leaves processes behind."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from covey_verify.children import Child, how_ended, run

SLEEP = "sleep 100 & echo $!; "
"""Shell code that leaves a process behind and prints its number."""


def gone(pid: int) -> bool:
    """Wait until a process has ended; give up after five seconds."""
    for _ in range(100):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_a_program_gives_its_output_and_its_exit_code() -> None:
    done = run(["sh", "-c", "cat; echo out; echo err >&2; exit 3"], 30.0)
    assert (done.returncode, done.stdout, done.stderr) == (3, b"out\n", b"err\n")


@pytest.mark.parametrize("then", ["sleep 100", "exit 0", "kill -9 $$", "exec sleep 100"])
def test_a_deadline_ends_all_that_was_started(then: str) -> None:
    # What was left holds the output open, so that the wait for it goes to the deadline in each case.
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        run(["sh", "-c", SLEEP + then], 0.5)
    assert gone(int(caught.value.stdout))


def test_an_exception_in_the_wait_ends_all_that_was_started(tmp_path: Path) -> None:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(["sh", "-c", f"({SLEEP}) > {tmp_path}/pid; sleep 100"], 30.0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_signal_to_the_terminal_does_not_reach_a_child() -> None:
    child = Child(["sleep", "100"])
    assert os.getsid(child.pid) == child.pid
    child.kill()
    assert child.wait() == -signal.SIGKILL
    child.kill()  # nothing happens: its number may be somebody else's by now


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exit code 0"),
        (-11, "killed by SIGSEGV (Segmentation fault)"),
        (-40, "killed by signal 40 (Real-time signal 6)"),
    ],
)
def test_an_end_is_named(code: int, words: str) -> None:
    assert how_ended(code) == words


@pytest.mark.parametrize(("present", "asked", "then"), [(-1, 5, (5, 6)), (3, 5, (3, 3)), (9, 5, (5, 6))])
def test_a_limit_is_only_lowered(present: int, asked: int, then: tuple[int, int]) -> None:
    code = f"""
import resource
from covey_verify.children import limit
resource.setrlimit(resource.RLIMIT_CPU, ({present}, {present}))
limit(resource.RLIMIT_CPU, {asked})
print(resource.getrlimit(resource.RLIMIT_CPU))
"""
    if resource.getrlimit(resource.RLIMIT_CPU)[1] != resource.RLIM_INFINITY:
        pytest.skip("this process has a limit of its own")
    assert run([sys.executable, "-c", code], 60.0).stdout.decode().strip() == str(then)


@pytest.mark.parametrize("platform", [sys.platform, "a system without prctl"])
def test_a_child_dies_with_its_parent(platform: str) -> None:
    code = f"""
import os, sys, time
parent = os.getpid()
if os.fork() == 0:
    from covey_verify.children import die_with
    sys.platform = {platform!r}
    die_with(parent)
    print(os.getpid(), flush=True)
    time.sleep(60)
time.sleep(60)
"""
    with Child([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(parent.pid, signal.SIGKILL)
        assert gone(child)


def test_a_child_whose_parent_is_gone_already_does_not_stay() -> None:
    code = "import time; from covey_verify.children import die_with; die_with(1 << 22); time.sleep(60)"
    assert run([sys.executable, "-c", code], 30.0).returncode == -signal.SIGKILL
