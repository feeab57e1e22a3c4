"""Run folders whose sealed records somebody has changed, and folders that are made to harm who looks.

Each damage is a file of the folder, and each look that reads the file has to name it.
"""

from __future__ import annotations

import io
import os
import random
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

SECRET = "the-key-of-who-looks"  # noqa: S105 - nobody's
"""What stands in a file outside that a link of the folder leads to."""
DEEP = 100_000
HUGE = 1 << 40
INFLATED = 1 << 26
"""Bytes of an archive's member that is deflated to a thousandth."""
ROWS, ARRAYS = "rollouts/step_000001.jsonl", "rollouts/step_000001.npz"
TOKENS = ("page tokens",)
COMPLETIONS = ("show R 1", "show R 1 1", "pairs R -o F/pairs.jsonl", "rescore R F/rewards.py:varied")
PAGES = ("page step", "page group", *TOKENS)
WHOLE = ("show R", "report R -o F/report.html", "page run")
READERS: Mapping[str, tuple[str, ...]] = {
    "metrics.jsonl": WHOLE,
    "evals.jsonl": WHOLE,
    "timings.jsonl": WHOLE,
    "result.json": WHOLE,
    "config.yaml": (*WHOLE, "explain R"),
    ROWS: (*COMPLETIONS, *PAGES),
    ARRAYS: TOKENS,
}
"""File -> the looks that read it."""
SEALED = ("metrics.jsonl", "evals.jsonl", "timings.jsonl", ROWS)


def _flipped_digit(lines: list[bytes], _: list[bytes], rng: random.Random) -> list[bytes]:
    n = rng.randrange(len(lines))
    place = rng.choice([m.start() for m in re.finditer(rb"\d", lines[n])])
    digit = rng.choice([d for d in b"0123456789" if d != lines[n][place]])
    return [*lines[:n], lines[n][:place] + bytes([digit]) + lines[n][place + 1 :], *lines[n + 1 :]]


def _swapped(lines: list[bytes], _: list[bytes], rng: random.Random) -> list[bytes]:
    one, other = rng.sample(range(len(lines)), 2)
    lines[one], lines[other] = lines[other], lines[one]
    return lines


def _cut(lines: list[bytes], _: list[bytes], rng: random.Random) -> list[bytes]:
    n = rng.randrange(len(lines))
    rest = lines[n][: rng.randrange(len(lines[n]))] if rng.random() < 0.5 else b""
    return [*lines[:n], *([rest] if rest else []), *lines[n + 1 :]]


def _foreign(lines: list[bytes], others: list[bytes], rng: random.Random) -> list[bytes]:
    n = rng.randrange(min(len(lines), len(others)))
    return [*lines[:n], others[n], *lines[n + 1 :]]


SEAL_DAMAGES: Mapping[str, Callable[[list[bytes], list[bytes], random.Random], list[bytes]]] = {
    "flipped digit": _flipped_digit,
    "swapped lines": _swapped,
    "cut line": _cut,
    "line of another run": _foreign,
}


def damage_sealed(run: Path, other: Path, rng: random.Random) -> tuple[str, str]:
    """Change a log under its seals, of ``run``; ``other`` has lines of another one. -> (file, how)."""
    name, how = rng.choice(SEALED), rng.choice(sorted(SEAL_DAMAGES))
    lines, others = ((folder / name).read_bytes().splitlines(keepends=True) for folder in (run, other))
    changed = SEAL_DAMAGES[how](list(lines), others, rng)
    if changed == lines:  # the line was the same in both
        how, changed = "cut line", lines[1:]
    (run / name).write_bytes(b"".join(changed))
    return name, how


def _link(path: Path, outside: Path) -> None:
    """To a file, or of the folder that has it to another folder."""
    outside.mkdir(exist_ok=True)
    (outside / path.name).write_text(f'{{"note": "{SECRET}"}}\n{SECRET}\n')
    if path.parent.name == "rollouts":
        path.parent.rename(path.parent.with_name("mine"))
        path.parent.symlink_to(outside)
    else:
        path.unlink()
        path.symlink_to(outside / path.name)


def _huge(path: Path, _: Path) -> None:
    os.truncate(path, HUGE)


def _deep(path: Path, _: Path) -> None:
    path.write_bytes(b"a: " * (path.suffix == ".yaml") + b"[" * DEEP + b"]" * DEEP + b"\n")


def _pipe(path: Path, _: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _inflated(path: Path, _: Path) -> None:
    """An archive with one member that is deflated; of other files a file of nothing but zeros."""
    written = io.BytesIO()
    with (
        zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("ends.npy", "w") as member,
    ):
        for _ in range(INFLATED >> 20):
            member.write(bytes(1 << 20))
    path.write_bytes(written.getvalue())


HARMS: Mapping[str, Callable[[Path, Path], None]] = {
    "link out": _link,
    "huge": _huge,
    "deep nesting": _deep,
    "pipe": _pipe,
    "huge member": _inflated,
}


def make_hostile(run: Path, outside: Path, rng: random.Random) -> tuple[str, str]:
    """Let a file of a run's folder be one that harms. -> (file, how)."""
    name, how = rng.choice(sorted(READERS)), rng.choice(sorted(HARMS))
    HARMS[how](run / name, outside)
    return name, how
