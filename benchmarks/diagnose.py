"""`covey diagnose` on runs whose cause is known: which change it names, and whether that is the cure.

    python benchmarks/diagnose.py [--only NAME ...] [--seeds 1] [--write]

The runs are the diseases of benchmarks/diseases.py whose cure is a setting, and healthy runs with one setting
out of range (CONFIGS). With --write the table goes to benchmarks/results/diagnose.md.
"""

from __future__ import annotations

import argparse
import datetime as dt
import shutil
import time
from pathlib import Path
from typing import Any

from covey.commands.diagnose import diagnose, plan_trials
from covey.config.load import load_config
from covey.errors import GuardStop
from covey.insight.trials import conclusion, helpful_trials
from covey.system.console import RunConsole
from covey.system.signals import StopSignal
from covey.training.pipeline import run_pipeline
from covey_verify.errors import ConfigError
from covey_verify.machine import processor_name
from diseases import (
    BASE,
    DISEASES,
    FOLDER,
    RESULTS,
    Disease,
    Settings,
    cold_start,
    config_of,
    merged,
    reward_model,
)

LARGER: Settings = {"rollout.prompts_per_step": 16, "eval.problems": 64, "train.steps": 16}
"""Enough completions and held-out problems that ten steps say something."""


READING = (
    "*Cure* is the setting that was put out of range, or the one in which the cured run of the disease",
    "matrix differs. *Named* are the changes under which more answers were correct, beyond chance, after",
    "some ten steps. A cure that pays off later, or in something else than correct answers, shows only in",
    "the finding that it ends. The policies are tiny and far from done, so a larger learning rate helps",
    "many of them.",
)
"""How the page is to be read."""


def out_of_range(what: str, key: str, settings: Settings) -> Disease:
    """A healthy run with one setting out of range; ``key`` is the setting whose change cures it."""
    return Disease("config", what, "half", settings, {}, key, "accuracy", LARGER)


def grpo(**more: object) -> Settings:
    """GRPO with other parts."""
    return {"algorithm": {"name": "grpo", "kl": None, **more}}


CONFIGS = {
    "rate_high": out_of_range("a learning rate 30 times too high", "train.lr", {"train.lr": 1e-2}),
    "rate_low": out_of_range("a learning rate 1,000 times too low", "train.lr", {"train.lr": 3e-7}),
    "bonus": out_of_range("an entropy bonus of 1", "algorithm.entropy.coef", grpo(entropy={"coef": 1.0})),
    "kl": out_of_range("a KL penalty of 10", "algorithm.kl.coef", grpo(kl={"coef": 10.0})),
    "alpha": out_of_range(
        "a LoRA whose alpha is a hundredth of its rank",
        "lora.alpha",
        {"lora": {"rank": 8, "alpha": 0.08}, "train.lr": 1e-3},
    ),
    "epochs": out_of_range(
        "sixteen inner epochs", "train.inner_epochs", {"train.inner_epochs": 16, "train.lr": 1e-3}
    ),
    "healthy": out_of_range("nothing", "", {}),
}


def made(settings: dict[str, Any], folder: Path) -> Path:
    """Train a run unless it is there."""
    if not (folder / "config.yaml").exists():
        try:
            run_pipeline(load_config(values=settings), RunConsole(quiet=True), StopSignal())
        except GuardStop as error:
            (folder / "ended").write_text(str(error))
    return folder


def main() -> None:
    """Train each run, diagnose it, and print what was named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cases = {
        **CONFIGS,
        **{name: case for name, case in DISEASES.items() if not case.twin and case.says != "refused"},
    }
    parser.add_argument("--only", nargs="+", choices=cases, default=list(cases), metavar="NAME")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/diagnose.md")
    arguments = parser.parse_args()
    reward_model()
    rows = []
    for seed in range(arguments.seeds):
        cold_start(seed)
        for name in arguments.only:
            rows.append(row(name, cases[name], seed))
            print(rows[-1], flush=True)
    if arguments.write:
        (RESULTS / "diagnose.md").write_text(page(rows))


def row(name: str, case: Disease, seed: int) -> str:
    """Diagnose one run and return its row of the table."""
    folder = FOLDER / "diagnosed" / f"{name}-{seed}"
    settings = settings_of_case(name, case, seed, folder)
    run = made(settings, folder)
    started = time.monotonic()
    try:
        plan = plan_trials(run)
        trials, unchanged = diagnose(plan, RunConsole(quiet=True), StopSignal())
    except ConfigError as error:
        return f"| {name} | {seed} | {case.what} | refused: {error} | | |"
    finally:
        shutil.rmtree(folder.with_name(f"{folder.name}-diagnosis"), ignore_errors=True)
    named = ", ".join(f"`{t.change.line}`" for t in helpful_trials(trials)) or "nothing"
    cure = case.says if case.id == "config" else ", ".join(case.cure)
    said = conclusion(trials, unchanged).replace("\n", " ")
    took = f"{time.monotonic() - started:.0f} s"
    return f"| {name} | {seed} | {case.what} | `{cure}` | {named} | {said} | {took} |"


def settings_of_case(name: str, case: Disease, seed: int, folder: Path) -> dict[str, Any]:
    """The config of a run that is ill."""
    if case.id != "config":
        return config_of(name, "disease", seed, folder)
    model = str(FOLDER / f"cold-{seed}" / "sft" / "final")
    data = {
        split: str(FOLDER / f"cold-{seed}" / f"{case.world}-{split}.jsonl") for split in ("train", "test")
    }
    own = merged(merged(BASE, case.both or {}), case.disease)
    return {**own, "seed": seed, "model": model, "data": data, "output": str(folder)}


def page(rows: list[str]) -> str:
    """The results as a page."""
    return "\n".join(
        [
            "# What `covey diagnose` names, on runs whose cause is known",
            "",
            f"{dt.date.today()}, `python benchmarks/diagnose.py --write`, {processor_name()}, one thread.",
            "",
            *READING,
            "",
            "| run | seed | what is wrong | cure | named | in full | took |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    main()
