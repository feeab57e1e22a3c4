"""`guards.on_finding: rollback` on the diseases: where a healed run ends, beside the sick and the cured one.

    python benchmarks/healing.py [--only NAME ...] [--seeds 1] [--healthy] [--write]

The cured run differs from the sick one in the disease's cure, in the same world. Each final model is measured
on all held-out problems of its world with the cured run's rewards and sampling. With --write the page goes to
benchmarks/results/healing.md.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import random
import shutil
import string
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from covey.commands.inference import evaluate_once
from covey.config.load import load_config
from covey.rng import key
from covey.runs.healing import Attempt, read_attempts
from covey.system.console import RunConsole
from covey.system.signals import StopSignal
from covey.training.pipeline import run_pipeline
from covey_verify.errors import CoveyError
from covey_verify.machine import processor_name
from diseases import DISEASES, FOLDER, HEALTHY, RESULTS, cold, cold_start, config_of, reward_model
from worlds import DIGITS, WORLDS

NEAR = 0.05
"""Accuracy by which a healed run may be below the cured one."""


def held_out(world: str, seed: int) -> Path:
    """The file of all held-out problems of a world."""
    path = cold(seed) / f"{world}-all.jsonl"
    letters = sorted(set(WORLDS[world].letters))
    prompts = (f"{a}{b}{c}=" for a in letters for b in DIGITS for c in string.ascii_uppercase)
    known = [json.loads(line) for line in (cold(seed) / f"{world}-test.jsonl").read_text().splitlines()]
    answers = {row["prompt"]: row["answer"] for row in known}
    gold = WORLDS[world]
    rows = [
        {"prompt": p, "answer": answers.get(p) or gold.answer(random.Random(p), p)}
        for p in prompts
        if key("held out", p) % 4 == 0
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def ended(settings: dict[str, Any], folder: Path) -> Path:
    """Train a run unless it is there; where a guard ends it, its newest checkpoint counts."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        run_pipeline(load_config(values={**settings, "output": str(folder)}), RunConsole(quiet=True), StopSignal())
    except CoveyError as error:
        (folder / "ended").write_text(str(error))
    return folder


def accuracy(folder: Path, measured: dict[str, Any], world: str, seed: int) -> float:
    """The sampled accuracy of a run's final model."""
    final = folder / "final"
    model = str(final) if final.is_dir() else measured["model"]
    data = {"train": measured["data"]["train"], "test": str(held_out(world, seed))}
    settings = {**measured, "model": model, "data": data, "eval": {"problems": 1000, "samples": 8}}
    settings["output"] = str(folder / "measured")
    return evaluate_once(load_config(values=settings), RunConsole(quiet=True)).summary()["pass@1"].value


def row(name: str, seed: int) -> tuple[str, bool]:
    """Train the three runs, and compare them."""
    case = {**DISEASES, **HEALTHY}[name]
    place = FOLDER / "healed" / f"{name}-{seed}".replace(" ", "-")
    sick = config_of(name, "disease", seed, place)
    cure = config_of(name, "cure", seed, place)
    cure = {**cure, "data": sick["data"]}
    healing = {**sick, "guards": {**sick["guards"], "on_finding": "rollback"}}
    runs = {"sick": sick, "healed": healing, "cured": cure}
    began = time.monotonic()
    found = {}
    for arm, settings in runs.items():
        folder = ended(settings, place / arm)
        found[arm] = accuracy(folder, cure, case.world, seed)
    attempts = read_attempts(place / "healed")
    tried = "; ".join(f"{a.step}: {a.finding}, `{a.line}`, {a.outcome}" for a in attempts) or "nothing"
    good = found["healed"] >= found["cured"] - NEAR
    rates = " | ".join(f"{found[arm]:.0%}" for arm in runs)
    shutil.rmtree(place)
    return f"| {name} | {seed} | {rates} | {'yes' if good else '**no**'} | {tried} | {time.monotonic() - began:.0f} s |", good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [name for name, case in DISEASES.items() if case.says != "refused"]
    parser.add_argument("--only", nargs="+", choices=[*known, *HEALTHY], default=known, metavar="NAME")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--healthy", action="store_true")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    reward_model()
    for seed in range(arguments.seeds):
        cold_start(seed)
        for name in [*arguments.only, *(HEALTHY if arguments.healthy else ())]:
            print(row(name, seed)[0], flush=True)


if __name__ == "__main__":
    main()
