"""Thousands of broken configs, data files and run folders: each is answered with a message.

    python benchmarks/reliability/fuzz.py [--trials 2000] [--seed 0] [--write]

In process. Of configs and data, without a model, exactly what `covey train` does before it loads one; of run
folders, what looks at them: the commands and the questions of the pages. A folder has odd values and bytes,
or a log changed under its seals, or a file that is made to harm: these have to be named.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import json
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from folders import READERS, SECRET, damage_sealed, make_hostile
from harness import report

from covey.cli import main as covey
from covey.config.load import load_config
from covey.config.rows import key_paths
from covey.config.schema import Data
from covey.insight.pages.compare import run_differences
from covey.insight.pages.records import Runs, run_list, run_page
from covey.insight.pages.server import json_answer
from covey.insight.pages.steps import group_page, step_page
from covey.insight.pages.tokens import token_page
from covey.system.integrity import SEAL, sealed_line
from covey.tasks.files import read_problems
from covey_verify.errors import CoveyError

VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1, 2.5, 1e400, float("nan"), "", "x", "dapo", "../../etc/passwd", "rewards.py:f",
    "a:b:c", "\x00", "\u202e", "9" * 400, [], [1, "2"], {}, {"name": "grpo"}, {"name": 3}, {"": {}},
    {"kl": {"coef": -1}}, [[]], {"a": {"b": {"c": 1}}}, "!!python/object:os.system", "1e-6",
    "yes", "2026-11-20",
)  # fmt: skip


LONGEST = 30
"""Seconds that a look at a run may take on a busy machine."""
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


RUN = """
model: tiny
data: {task: last_digit, train_size: 16, test_size: 4}
rewards: ["rewards.py:varied"]
rollout: {group_size: 2, prompts_per_step: 2, max_tokens: 4}
algorithm: %s
train: {steps: 3, lr: 1.0e-3}
eval: {problems: 2, samples: 1}
"""


def made_runs(folder: Path) -> None:
    """A run and one with a critic."""
    (folder / "rewards.py").write_text("def varied(completion):\n    return sum(map(ord, completion)) % 7\n")
    for name in ("grpo", "ppo"):
        (folder / f"{name}.yaml").write_text(RUN % name)
        with contextlib.redirect_stdout(io.StringIO()):
            if covey(["train", str(folder / f"{name}.yaml"), "--output", str(folder / "whole" / name)]) > 1:
                raise SystemExit("no run to damage")


def with_other_value(line: bytes, rng: random.Random) -> bytes:
    """A record in which one value, however deep, is odd or gone; half of the time with the seal of that."""
    record = json.loads(line)
    seal = record.pop(SEAL)
    place = record
    while True:
        key = rng.choice(sorted(place) if isinstance(place, dict) else range(len(place)))
        inside = place[key]
        if not isinstance(inside, dict | list) or not inside or rng.random() < 0.3:
            break
        place = inside
    if rng.random() < 0.2:
        del place[key]
    else:
        place[key] = rng.choice((*VALUES, 10**400, {"a": [1]}, -7))
    again = sealed_line(record) if rng.random() < 0.5 else json.dumps({**record, SEAL: seal})
    return again.rstrip().encode()


def damage_run(run: Path, rng: random.Random) -> str:
    """One file of a run with other bytes, or a record with another value. -> which."""
    files = [
        p for p in sorted(run.rglob("*")) if p.suffix in (".json", ".jsonl", ".npz", ".yaml") and p.is_file()
    ]
    near = [p for p in files if "checkpoints" not in p.parts and "final" not in p.parts]
    path = rng.choice(near if rng.random() < 0.9 else files)
    content = path.read_bytes()
    if path.suffix == ".jsonl" and content and rng.random() < 0.6:
        lines = content.splitlines()
        number = rng.randrange(len(lines))
        lines[number] = with_other_value(lines[number], rng)
        path.write_bytes(b"\n".join(lines) + b"\n")
        if rng.random() < 0.5:
            (run / "result.json").unlink()  # which has the seal of the whole log
    elif rng.random() < 0.1:
        path.unlink()
    else:
        path.write_bytes(damaged(damaged(content, rng), rng))
    return path.name


def looks(folder: Path) -> dict[str, Callable[[], str]]:
    """All that looks at a run, by what is said of it in folders.py: commands, and the pages' questions."""
    run, other = folder / "runs" / "r", folder / "whole" / "grpo"
    commands = ["show R", "show R 1", "show R 1 1", "explain R", "diff R O", "diff O R"]
    commands += ["report R -o F/report.html", "pairs R -o F/pairs.jsonl", "rescore R F/rewards.py:varied"]
    words = {"R": str(run), "O": str(other)}
    split = {c: [words.get(w, w.replace("F/", f"{folder}/")) for w in c.split()] for c in commands}
    pages: dict[str, Callable[[], object]] = {
        "page list": lambda: run_list(Runs(run.parent)),
        "page run": lambda: run_page("r", run),
        "page step": lambda: step_page(run, 1),
        "page group": lambda: group_page(run, 1, 1),
        "page tokens": lambda: token_page(run, 1, 1, 1),
        "page compare": lambda: run_differences(run, other),
    }
    return {
        **{c: partial(command, own) for c, own in split.items()},
        **{name: lambda page=page: json_answer(page()).body.decode() for name, page in pages.items()},
    }


def command(words: list[str]) -> str:
    """What a command said, and the report it wrote. Raises what it could not answer."""
    out, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
        code = covey(words)
    if "a bug in covey" in said.getvalue():
        raise AssertionError(f"{words[0]}: {said.getvalue().splitlines()[-1]}")
    if code > 1:
        raise CoveyError(said.getvalue())
    written = Path(words[-1]).read_text() if words[0] == "report" else ""
    return out.getvalue() + said.getvalue() + written


def prepared(folder: Path, rng: random.Random) -> tuple[Path, Path]:
    """A whole run that may be damaged, and another one."""
    shutil.rmtree(folder / "runs", ignore_errors=True)
    names = rng.sample(("grpo", "ppo"), 2)
    run = folder / "runs" / "r"
    shutil.copytree(folder / "whole" / names[0], run, ignore=shutil.ignore_patterns("*.safetensors"))
    return run, folder / "whole" / names[1]


def look_at_damage(folder: Path, rng: random.Random) -> None:
    """One look at a run with one damage."""
    run, _ = prepared(folder, rng)
    damage_run(run, rng)
    rng.choice([*looks(folder).values()])()


def look_at_folder(folder: Path, rng: random.Random, hostile: bool) -> None:
    """One look at a file that was changed under its seal, or that is made to harm.

    Raises AssertionError where the look takes long, does not name the file, or shows another one.
    """
    run, other = prepared(folder, rng)
    name, how = make_hostile(run, folder / "outside", rng) if hostile else damage_sealed(run, other, rng)
    every = looks(folder)
    own = READERS[name]
    look = rng.choice(own if rng.random() < 0.8 else sorted(every))
    case, started = f"{how}, {name}, {look}", time.monotonic()
    try:
        said = every[look]()
    except CoveyError as error:
        said = str(error)
    except Exception as error:
        raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error
    places = (Path(name).name, Path(name).parent.name or name)
    if SECRET in said:
        raise AssertionError(f"{case}: shows a file from elsewhere")
    if look in own and not any(place in said for place in places):
        raise AssertionError(f"{case}: does not name the file: {said[:200]}")
    if time.monotonic() - started > LONGEST:
        raise AssertionError(f"{case}: took {time.monotonic() - started:.0f} s")


def main() -> None:
    """All kinds of files."""
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
        made_runs(Path(folder))
        kinds_of_run: dict[str, Callable[[Path, random.Random], None]] = {
            "run": look_at_damage,
            "sealed logs": partial(look_at_folder, hostile=False),
            "hostile folders": partial(look_at_folder, hostile=True),
        }
        for kind, look in kinds_of_run.items():
            for trial in range(arguments.trials // 2 if kind == "run" else arguments.trials // 4):
                try:
                    look(Path(folder), random.Random(f"{arguments.seed} {trial}"))
                    found[f"{kind}: accepted"] += 1
                except CoveyError:
                    found[f"{kind}: answered"] += 1
                except Exception as error:
                    found["tracebacks"] += 1
                    examples.setdefault(
                        f"{kind}: {type(error).__name__}: {str(error)[:300]}", str(trial).encode()
                    )
    for error, content in examples.items():
        print(error, content[:300])
    figures = {**found, "tracebacks": found["tracebacks"], "slowest answer, ms": round(1000 * slowest)}
    report(
        "fuzzed configs, data files and run folders",
        {**figures, "ok": not found["tracebacks"]},
        arguments.write,
    )
    raise SystemExit(bool(found["tracebacks"]))


if __name__ == "__main__":
    main()
