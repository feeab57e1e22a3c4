"""Thousands of broken configs and data files: each is answered with a message.

    python benchmarks/reliability/fuzz.py [--trials 2000] [--seed 0] [--write]

In process, without a model: exactly what `covey train` does before it loads one.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import yaml
from harness import report

from covey.config.load import load_config
from covey.config.schema import Data
from covey.config.sources import key_paths
from covey.errors import CoveyError
from covey.tasks.files import read_problems

VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1, 2.5, 1e400, float("nan"), "", "x", "dapo", "../../etc/passwd", "rewards.py:f",
    "a:b:c", "\x00", "\u202e", "9" * 400, [], [1, "2"], {}, {"name": "grpo"}, {"name": 3}, {"": {}},
    {"kl": {"coef": -1}}, [[]], {"a": {"b": {"c": 1}}}, "!!python/object:os.system", "1e-6",
    "yes", "2026-11-20",
)  # fmt: skip


ODD = (b"\n", b"{", b"}", b"&a *a", b"\xff\xfe", b"[" * 50, b"\t", b": ")


def config_text(rng: random.Random) -> bytes:
    """A config that is probably wrong: odd values, odd keys, damaged text."""
    keys = [*key_paths(), "algorithm.kl.coef", "algorithm.surrogate", "algorithm.advantage.name", "stages"]
    raw: dict[str, Any] = {}
    for _ in range(rng.randint(0, 6)):
        *parents, last = rng.choice(keys).split(".")
        place: Any = raw
        for parent in parents:
            below = place.setdefault(parent, {}) if isinstance(place, dict) else {}
            place = below if isinstance(below, dict) else {}
        place[last if rng.random() < 0.8 else last[:-1] + rng.choice("xyz ")] = rng.choice(VALUES)
    return damaged(yaml.safe_dump(raw).encode(), rng)


def data_text(rng: random.Random) -> bytes:
    """A data file that is probably wrong."""
    rows = []
    for _ in range(rng.randint(0, 4)):
        row = {"prompt": rng.choice(VALUES), "answer": rng.choice(VALUES)}
        row |= {rng.choice(["prompt", "completions", "answer", "x", ""]): rng.choice(VALUES)}
        rows.append(json.dumps(row if rng.random() < 0.9 else rng.choice(VALUES)))
    return damaged("\n".join(rows).encode(), rng)


def damaged(content: bytes, rng: random.Random) -> bytes:
    """Some bytes changed, cut or doubled, half of the time."""
    changed = bytearray(content)
    for _ in range(rng.choice((0, 0, 1, 3))):
        place = rng.randrange(len(changed) + 1)
        match rng.randrange(4):
            case 0:
                changed[place:place] = bytes([rng.randrange(256)])
            case 1:
                del changed[place : place + rng.randint(1, 20)]
            case 2:
                changed[place:place] = changed[: rng.randint(0, 200)]
            case _:
                changed[place:place] = rng.choice(
                    (b"\n", b"{", b"}", b"&a *a", b"\xff\xfe", b"[" * 50, b"\t", b": ")
                )
    return bytes(changed)


def main() -> None:
    """Both kinds of files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    rng, found, slowest = random.Random(arguments.seed), Counter[str](), 0.0
    examples: dict[str, bytes] = {}
    kinds = {
        "config": (config_text, "run.yaml", load_config),
        "data": (data_text, "data.jsonl", lambda path: read_problems(path, Data(prompt="prompt"))),
        "table": (data_text, "data.csv", lambda path: read_problems(path, Data(prompt="prompt"))),
        "columns": (data_text, "data.parquet", lambda path: read_problems(path, Data(prompt="prompt"))),
    }
    shares = {"config": 1.0, "data": 0.6, "table": 0.3, "columns": 0.1}
    with tempfile.TemporaryDirectory() as folder:
        for kind, (make, name, read) in kinds.items():
            for _ in range(int(arguments.trials * shares[kind])):
                content = make(rng)
                path = Path(folder) / name
                path.write_bytes(content)
                started = time.monotonic()
                try:
                    collections.deque([read(path)])
                    found[f"{kind}: accepted"] += 1
                except CoveyError:
                    found[f"{kind}: answered"] += 1
                except Exception as error:
                    found["tracebacks"] += 1
                    examples.setdefault(f"{kind}: {type(error).__name__}: {str(error)[:80]}", content)
                slowest = max(slowest, time.monotonic() - started)
    for error, content in examples.items():
        print(error, content[:300])
    figures = {**found, "tracebacks": found["tracebacks"], "slowest answer, ms": round(1000 * slowest)}
    report("fuzzed configs and data files", {**figures, "ok": not found["tracebacks"]}, arguments.write)
    raise SystemExit(bool(found["tracebacks"]))


if __name__ == "__main__":
    main()
