"""`guards.on_finding: rollback` on the diseases: where a healed run ends, beside the sick and the cured one.

    python benchmarks/healing.py [--only NAME ...] [--seeds 1] [--write]

The cured run differs from the sick one in the disease's cure, in the same world. Each final model is measured
on all held-out problems of its world, with the cured run's rewards and sampling. Names are those of
benchmarks/diseases.py, presets on a task that can be learned among them. With --write the page goes to
benchmarks/results/healing.md.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import random
import re
import shutil
import string
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from covey.commands.inference import evaluate_once
from covey.config.load import load_config
from covey.errors import GuardStop
from covey.rng import key
from covey.runs.rollbacks import read_rollbacks
from covey.system.console import RunConsole
from covey.system.signals import StopSignal
from covey.training.pipeline import run_pipeline
from covey_verify.machine import processor_name
from diseases import DISEASES, FOLDER, HEALTHY, RESULTS, cold, cold_start, config_of, reward_model
from worlds import DIGITS, WORLDS

NEAR = 0.05
"""Accuracy by which a healed run may end below the cured one."""
HEAD = ("run", "seed", "sick", "healed", "cured", "near the cure", "what the run did", "took")
READING = (
    "Accuracy of sampled answers on the held-out problems, of the last model of each run: as it is, with",
    "`guards: {on_finding: rollback}`, and with the disease's cure from the start. *Near the cure*: not more",
    "than five points below the cured run. Where the cure of the matrix is another world, the cured run",
    "differs in settings alone, if at all. `single` is refused before it begins.",
)
"""How the page is to be read."""


def held_out(world: str, seed: int) -> Path:
    """The file of all held-out problems of a world."""
    path = cold(seed) / f"{world}-all.jsonl"
    known = [json.loads(line) for line in (cold(seed) / f"{world}-test.jsonl").read_text().splitlines()]
    answers = {row["prompt"]: row["answer"] for row in known}
    letters = sorted(set(WORLDS[world].letters))
    prompts = (f"{a}{b}{c}=" for a in letters for b in DIGITS for c in string.ascii_uppercase)
    rows = [
        {"prompt": p, "answer": answers.get(p) or WORLDS[world].answer(random.Random(p), p)}
        for p in prompts
        if key("held out", p) % 4 == 0
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def trained(settings: dict[str, Any], folder: Path) -> Path:
    """Train a run; a guard may end it."""
    try:
        run_pipeline(
            load_config(values={**settings, "output": str(folder)}), RunConsole(quiet=True), StopSignal()
        )
    except GuardStop as error:
        (folder / "ended").write_text(str(error))
    return folder


def accuracy(folder: Path, cured: dict[str, Any], world: str, seed: int) -> float:
    """The sampled accuracy of a run's final model; of its first one if a guard ended it."""
    final = folder / "final"
    settings = {
        **cured,
        "model": str(final) if final.is_dir() else cured["model"],
        "data": {"train": cured["data"]["train"], "test": str(held_out(world, seed))},
        "eval": {"problems": 1000, "samples": 4},
        "output": str(folder / "measured"),
    }
    return evaluate_once(load_config(values=settings), RunConsole(quiet=True)).summary()["pass@1"].value


def row(name: str, seed: int) -> str:
    """Train the three runs of a disease, and return their row of the table."""
    case = {**DISEASES, **HEALTHY}[name]
    place = FOLDER / "healed" / f"{name}-{seed}".replace(" ", "-")
    shutil.rmtree(place, ignore_errors=True)
    sick = config_of(name, "disease", seed, place)
    # Another world cures nothing here.
    cured = {**config_of(name, "cure", seed, place), "data": sick["data"]}
    healing = {**sick, "guards": {**sick["guards"], "on_finding": "rollback"}}
    began = time.monotonic()
    arms = {"sick": sick, "healed": healing, "cured": cured}
    found = {
        arm: accuracy(trained(settings, place / arm), cured, case.world, seed)
        for arm, settings in arms.items()
    }
    told = "; ".join(
        f"step {a.step}: {a.finding}, {change(a.line, a.outcome)}" for a in read_rollbacks(place / "healed")
    )
    near = "yes" if found["healed"] >= found["cured"] - NEAR else "**no**"
    rates = [f"{rate:.0%}" for rate in found.values()]
    shutil.rmtree(place)
    cells = [name, str(seed), *rates, near, told or "nothing", f"{time.monotonic() - began:.0f} s"]
    return f"| {' | '.join(cells)} |"


def change(line: str, outcome: str) -> str:
    """What was changed, and what came of it."""
    return f"`{line}`{f' ({outcome})' if outcome else ''}" if line else "undone"


def page(rows: Sequence[str]) -> str:
    """The results as a page."""
    near = sum("| yes |" in line for line in rows)
    known = [[int(rate) for rate in re.findall(r"(\d+)% \|", line)[:3]] for line in rows]
    ill = [(healed, cured) for sick, healed, cured in known if sick < cured - 100 * NEAR]
    cured_again = sum(healed >= cured - 100 * NEAR for healed, cured in ill)
    count = f"{near} of {len(rows)} runs end near the cure. Left alone, {len(ill)} would not"
    lines = [
        "# Where a run that heals itself ends",
        f"{dt.date.today()}, `{' '.join(['python', *sys.argv])}`, {processor_name()}, one thread.",
        "\n".join(READING),
        f"{count}; {cured_again} of these are healed.",
        "\n".join([f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|", *rows]),
    ]
    return "\n\n".join(lines) + "\n"


def main() -> None:
    """Train and measure each run, and print its row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [*(name for name, case in DISEASES.items() if case.says != "refused"), *HEALTHY]
    parser.add_argument("--only", nargs="+", choices=known, default=known, metavar="NAME")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/healing.md")
    arguments = parser.parse_args()
    reward_model()
    rows = []
    for seed in range(arguments.seeds):
        cold_start(seed)
        for name in arguments.only:
            rows.append(row(name, seed))
            print(rows[-1], flush=True)
    if arguments.write:
        (RESULTS / "healing.md").write_text(page(rows))


if __name__ == "__main__":
    main()
