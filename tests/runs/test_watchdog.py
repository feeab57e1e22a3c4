"""A run in which nothing happens any more says what it was doing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HELD = """
import ctypes, sys, time
from pathlib import Path
from covey.runs.watchdog import Watchdog

def holds_the_interpreter():
    ctypes.PyDLL(None).sleep(2)

with Watchdog(Path(sys.argv[1]), minutes=0.01).watching():
    time.sleep(0.2)
    holds_the_interpreter()
print("went on")
"""


def test_who_holds_the_interpreter_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HELD, tmp_path], capture_output=True, text=True, timeout=60, check=True
    )
    assert "in holds_the_interpreter" in done.stderr
    assert done.stdout == "went on\n"
