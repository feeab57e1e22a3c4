"""What surrounds a run goes wrong: clocks, paths, limits, full disks, moved folders, stopped processes.

    python benchmarks/reliability/surroundings.py [NAME ...] [--write]

A case runs `covey train` once or more and says how each run has to end; the last one has to end with
the bits of an undisturbed run, unless it has to fail. Cases whose tool is missing here are left out:
faketime, unshare (util-linux), bwrap, prlimit.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

import psutil
from harness import fingerprint, report, write_config

SETTINGS = {"algorithm": "grpo", "scoring": {"timeout": 1.0}, "guards": {"stall_minutes": 0.1}}
SLOW = """
import time
from covey import reward
{options}
def varied(completion):
    for _ in range(20):
        time.sleep({seconds} / 20)
    return len(completion) + sum(map(ord, completion)) % 7
"""
FAKETIME = next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))), None)


@dataclass
class Place:
    """A folder with a config, and the runs that are started in it."""

    folder: Path
    prefix: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict)
    output: str = "run"

    @property
    def run(self) -> Path:
        """The run folder."""
        return self.folder / self.output

    def reward(self, seconds: float, options: str = "") -> None:
        """Let every call of the reward take its time."""
        (self.folder / "rewards.py").write_text(SLOW.format(seconds=seconds, options=options))

    def command(self, *options: str) -> list[str]:
        """`covey train` here."""
        config = str(self.folder / "run.yaml")
        return [sys.executable, "-m", "covey", "train", config, "--output", str(self.run), *options]

    def start(self, *options: str, command: Sequence[str] = ()) -> subprocess.Popen[str]:
        """Begin to train."""
        environment = {k: v for k, v in {**os.environ, **self.environment}.items() if v}
        return subprocess.Popen(
            [*self.prefix, *(command or self.command(*options))],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def train(self, *options: str, command: Sequence[str] = ()) -> tuple[int, str]:
        """Exit code and last line."""
        return ended(self.start(*options, command=command))


End = tuple[int, str]


def ended(process: subprocess.Popen[str]) -> End:
    """Exit code and last line of a process."""
    said = process.communicate(timeout=300)[1].strip().splitlines()
    return process.returncode, said[-1] if said else ""


def clock_jumps(place: Place) -> list[End]:
    """The wall clock jumps a day ahead and a day back, all the time."""
    clock = place.folder / "clock"
    clock.write_text("+0d")
    place.environment = {
        "LD_PRELOAD": str(FAKETIME),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    process = place.start()
    for jump in cycle(("+1d", "-1d")):
        if process.poll() is not None:
            return [ended(process)]
        (place.folder / "next").write_text(jump)
        (place.folder / "next").replace(clock)
        time.sleep(0.05)
    raise AssertionError


def another_zone(place: Place) -> list[End]:
    """Killed in Tokyo, gone on in Lima."""
    place.environment = {"TZ": "Asia/Tokyo"}
    first = place.train("--inject", "step.kill@3")
    place.environment = {"TZ": "America/Lima"}
    return [first, place.train()]


def moved(place: Place) -> list[End]:
    """The run folder is moved between the kill and the resume."""
    first = place.train("--inject", "step.kill@4")
    place.run.rename(place.folder / "elsewhere")
    place.output = "elsewhere"
    resume = [sys.executable, "-m", "covey", "resume", str(place.run)]
    return [first, place.train(command=resume)]


def two_at_once(place: Place) -> list[End]:
    """Two processes are started in one folder at the same moment."""
    return sorted(map(ended, [place.start(), place.start()]), reverse=True)


def full_disk(place: Place) -> list[End]:
    """A small file system fills up; later it is larger."""
    disk, codes = place.folder / "disk", place.folder / "codes"
    disk.mkdir()
    place.output = "disk/run"
    train = f"{shlex.join(place.command())}; echo $? >> {shlex.quote(str(codes))}"
    script = f"""
        cd {shlex.quote(str(place.folder))} && mount -t tmpfs -o size=16m none disk && {{ {train}; }}
        mount -o remount,size=1g disk && {{ {train}; }}
        cp -r disk/run kept
    """
    said = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, check=False
    ).stderr
    place.output = "kept"
    lines = said.strip().splitlines() or [""]
    return [(int(code), lines[0]) for code in codes.read_text().split()]


def read_only(place: Place) -> list[End]:
    """Nothing but a folder for temporary files can be written to."""
    scratch = place.folder / "scratch"
    scratch.mkdir()
    view = ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", str(scratch)]
    place.prefix = ["bwrap", *view]
    place.environment = {"TMPDIR": str(scratch)}
    return [place.train()]


def suspended(place: Place) -> list[End]:
    """Stopped (SIGSTOP) for longer than any time limit, and continued, again and again."""
    place.reward(0.05)
    process = place.start()
    while not (place.run / "rollouts").exists():
        time.sleep(0.05)
    for _ in range(3):
        time.sleep(1.0)
        os.killpg(process.pid, signal.SIGSTOP)  # the parent alone would leave its child at work
        time.sleep(7.0)
        os.killpg(process.pid, signal.SIGCONT)
    return [ended(process)]


def verifiers_killed(place: Place) -> list[End]:
    """The server behind rewards in processes of their own is killed every second."""
    place.reward(0.02, '@reward(isolate="process")')
    process = place.start()
    killed = 0
    while process.poll() is None:
        working = psutil.Process(process.pid).children() if (place.run / "rollouts").exists() else []
        servers = [server for run in working for server in run.children()]
        for server in servers:
            server.kill()
        killed += len(servers)
        time.sleep(1.0)
    assert killed
    return [ended(process)]


def under(*prefix: str, output: str = "run", **environment: str) -> Callable[[Place], list[End]]:
    """One run behind a prefix, in another environment; an empty value removes a variable."""

    def case(place: Place) -> list[End]:
        place.prefix, place.environment, place.output = prefix, environment, output
        return [place.train()]

    return case


GOOD, KILLED = (0, ""), (-signal.SIGKILL, "")
CASES: dict[str, tuple[Callable[[Place], list[End]], list[End]]] = {
    "clock jumps by days": (clock_jumps, [GOOD]),
    "another time zone": (another_zone, [KILLED, GOOD]),
    "folder moved": (moved, [KILLED, GOOD]),
    "two at once": (two_at_once, [(4, "works in this folder"), GOOD]),
    "full disk": (full_disk, [(8, "Free some space"), GOOD]),
    "read-only file system": (read_only, [(8, "is read-only; choose another --output")]),
    "stopped and continued": (suspended, [GOOD]),
    "verifiers killed": (verifiers_killed, [GOOD]),
    "64 open files": (under("prlimit", "--nofile=64"), [GOOD]),
    "no network": (under("unshare", "-rn", HF_HUB_OFFLINE=""), [GOOD]),
    "no HOME": (under(HOME="", XDG_CACHE_HOME=""), [GOOD]),
    "locale C": (under(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0"), [GOOD]),
    "odd letters in paths": (under(LC_ALL="C", output="a 'run' #1 & ü 雪/$HOME\n*: \""), [GOOD]),
    "a path that is not UTF-8": (under(output="l\udce4uft"), [(2, "is not UTF-8")]),
}
NEEDS = {"clock jumps by days": FAKETIME, "read-only file system": shutil.which("bwrap")} | dict.fromkeys(
    ("full disk", "no network"), shutil.which("unshare")
)


def main() -> None:
    """All cases, or those named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of: {', '.join(CASES)}")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        undisturbed = Place(write_config(Path(scratch) / "undisturbed", SETTINGS).parent)
        assert undisturbed.train()[0] in (0, 1)
        whole = fingerprint(undisturbed.run)
        for number, name in enumerate(arguments.names or CASES):
            case, expected = CASES[name]
            if not NEEDS.get(name, True):
                found[name] = "left out: its tool is missing"
                continue
            place = Place(write_config(Path(scratch) / str(number), SETTINGS).parent)
            ends = case(place)
            right = len(ends) == len(expected) and all(
                # Exit code 1 says that the model did not learn: a run of seconds may end so.
                code == wanted or ((code, wanted) == (1, 0) and words in line)
                for (code, line), (wanted, words) in zip(ends, expected, strict=True)
            )
            same = expected[-1] != GOOD or fingerprint(place.run) == whole
            found[name] = "ok" if right and same else f"{ends}, same bits: {same}"
            print(f"{name}: {found[name]}", flush=True)
    ok = all(v == "ok" or v.startswith("left out") for v in found.values())
    report("surroundings", {"cases": len(found), "found": found, "ok": ok}, arguments.write)
    raise SystemExit(not ok)


if __name__ == "__main__":
    main()
