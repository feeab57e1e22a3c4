"""The disk: a kill or an error at every file-system call of a run, damage to every file.

    python benchmarks/reliability/disk.py calls  [--every 1] [--write]     # needs strace
    python benchmarks/reliability/disk.py errors [--every 1] [--errors ENOSPC EIO] [--write]
    python benchmarks/reliability/disk.py damage [--write]

`calls` kills the process at the N-th such call, for every N; `errors` lets it fail instead. Both need
strace. Afterwards the run must go on and end with the bits of an undisturbed one. `damage`
deletes, truncates, flips a bit of, or swaps with the older checkpoint's every file of the newest
checkpoint: each must be noticed, named, and answered by the older one.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from harness import child, covey, fingerprint, report, wait, warm_up, write_config

SETTINGS: dict[str, Any] = {
    "algorithm": {"name": "grpo", "kl": {"refresh_every": 1}},
    "train": {"steps": 4, "save_every": 1, "keep": 2},
    "eval": {"problems": 2, "samples": 1},
}
CALLS = (
    "write",
    "pwrite64",
    "fsync",
    "rename",
    "renameat",
    "mkdir",
    "unlink",
    "unlinkat",
    "rmdir",
    "ftruncate",
    "truncate",
)
FAILING = ("write", "fsync", "rename", "renameat", "mkdir", "ftruncate")


def traced(config: Path, run: Path, *options: str) -> int:
    """A run under strace, which is attached before it begins; returns the run's exit code."""

    def work() -> int:
        os.kill(os.getpid(), signal.SIGSTOP)
        return covey("train", str(config), "--output", str(run), errors=config.parent / "errors")()

    pid = child(work)
    os.waitpid(pid, os.WUNTRACED)
    tracer = subprocess.Popen(["strace", "-q", *options, "-p", str(pid)], stderr=subprocess.DEVNULL)
    while f"TracerPid:\t{tracer.pid}\n" not in Path(f"/proc/{pid}/status").read_text():
        time.sleep(0.001)
    os.kill(pid, signal.SIGCONT)
    code = wait(pid)
    tracer.wait()
    return code


def calls_of(config: Path, run: Path) -> list[tuple[str, int]]:
    """Every call that changes the disk, as (name, how many of that name came before it, from 1)."""
    log = config.parent / "calls"
    traced(config, run, "-o", str(log), "-y", "-e", f"trace={','.join(CALLS)}")
    seen: Counter[str] = Counter()
    found = []
    for line in log.read_text().splitlines():
        if match := re.match(r"(\w+)\(", line):
            seen[match[1]] += 1
            if str(run) in line or match[1] not in ("write", "pwrite64"):
                found.append((match[1], seen[match[1]]))
    return found


def strike(config: Path, whole: str, errors: list[str], every: int) -> Counter[str]:
    """Fail with each error, or without any be killed, at every call in turn."""
    run, total = config.parent / "run", Counter[str]()
    shutil.rmtree(run)
    points = calls_of(config, run)
    chosen = [p for p in points if not errors or p[0] in FAILING][::every]
    for fault in [f"error={name}" for name in errors] or ["signal=SIGKILL"]:
        for name, number in chosen:
            shutil.rmtree(run)
            inject = f"inject={name}:{fault}:when={number}"
            code = traced(config, run, "-e", f"trace={name}", "-e", inject)
            total["points"] += 1
            said = (config.parent / "errors").read_text(errors="replace")
            if errors and "a bug in covey" in said:
                total["bare tracebacks"] += 1
                print(name, number, fault, code, said.strip().splitlines()[-1][:200], flush=True)
            code = wait(child(covey("train", str(config), "--output", str(run))))
            same = code in (0, 1) and fingerprint(run) == whole
            total["identical"] += same
            if not same:
                print("DIFFERS", name, number, fault, code, flush=True)
    return total


def damages(content: bytes, older: bytes | None) -> dict[str, bytes | None]:
    """What a file may become; None: it is gone."""
    flipped = bytearray(content)
    if content:
        flipped[len(content) // 2] ^= 1
    return {
        "deleted": None,
        "emptied": b"",
        "half": content[: len(content) // 2],
        "nearly whole": content[:-1],
        "one bit flipped": bytes(flipped),
        "swapped": older,
    }


def damage(config: Path, whole: str) -> Counter[str]:
    """Every file of the newest checkpoint, in every way."""
    run, spare, total = config.parent / "run", config.parent / "spare", Counter[str]()
    shutil.rmtree(run)
    wait(child(covey("train", str(config), "--output", str(run), "--inject", "step.sigterm@3")))
    run.rename(spare)
    older, newest = sorted(p.name for p in (spare / "checkpoints").iterdir())
    for name in sorted(p.name for p in (spare / "checkpoints" / newest).iterdir()):
        content = (spare / "checkpoints" / newest / name).read_bytes()
        before = (spare / "checkpoints" / older / name).read_bytes()
        for how, changed in damages(content, before if before != content else None).items():
            if changed == content or (how == "swapped" and changed is None):
                continue
            shutil.rmtree(run, ignore_errors=True)
            shutil.copytree(spare, run)
            path = run / "checkpoints" / newest / name
            path.unlink() if changed is None else path.write_bytes(changed)
            errors = config.parent / "errors"
            refused = wait(
                child(covey("train", str(config), "--output", str(run), "--strict", errors=errors))
            )
            total["cases"] += 1
            # A manifest that is still one accuses a file it lists: then the checkpoint is what is named.
            named = (newest if name == "manifest.json" else name) in errors.read_text()
            total["noticed and named"] += refused == 4 and named
            code = wait(child(covey("train", str(config), "--output", str(run))))
            same = code in (0, 1) and fingerprint(run) == whole
            total["fell back, identical"] += same
            if refused != 4 or not named or not same:
                print("MISSED", name, how, refused, code, flush=True)
    return total


def main() -> None:
    """One of the three."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=("calls", "errors", "damage"))
    parser.add_argument("--errors", nargs="+", default=["ENOSPC", "EIO"])
    parser.add_argument("--every", type=int, default=1, help="try only every n-th call")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    warm_up()
    with tempfile.TemporaryDirectory() as scratch:
        config = write_config(Path(scratch).resolve() / "p", SETTINGS)
        wait(child(covey("train", str(config), "--output", str(config.parent / "run"))))
        whole = fingerprint(config.parent / "run")
        if arguments.kind == "damage":
            total = damage(config, whole)
            ok = total["cases"] == total["noticed and named"] == total["fell back, identical"]
        else:
            errors = arguments.errors if arguments.kind == "errors" else []
            total = strike(config, whole, errors, arguments.every)
            ok = total["points"] == total["identical"] and not total["bare tracebacks"]
    names = {
        "calls": "kill at every file-system call",
        "errors": f"{' and '.join(arguments.errors)} at every file-system call",
        "damage": "every file of a checkpoint damaged",
    }
    report(names[arguments.kind], {**total, "ok": ok}, arguments.write)
    raise SystemExit(not ok)


if __name__ == "__main__":
    main()
