"""Where reinforcement begins: random weights, a base model, or the same base after supervised learning.

    python benchmarks/starts.py [--seeds 0 1 2] [--only NAME ...] [--write]

Three digits to add, and a model of 0.1M weights. A base model is one that has read plain solutions ("7+8=5,
5+9=4. The answer is 4") until it gets two in five right by its last number; one text in twenty has its answer
in tags. `base, then supervised` is that model after 480 tagged worked answers. Then the same reinforcement
for all, at two rates, paid for a correct answer in tags and a tenth for the tags. What is counted is sampled
completions, as many for every arm; what a model has read before is in the table. Held-out accuracy is by the
tagged answer, on the same 200 problems. Runs are kept in covey-benchmarks/starts of the temporary folder,
so that the same command goes on after
an interruption. With --write the tables and the curves go to benchmarks/results/starts.{md,svg}.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

import covey
from covey.errors import GuardStop
from covey.estimates import Evaluation, over_seeds
from covey.insight.chart import Line, Panel, chart
from covey.insight.stages import points
from covey.models.tiny import build_model, build_tokenizer
from lanes import RL, machine, merged, quiet, records, settings_of, sum_row, write_rows
from presets import RESULTS

FOLDER = Path(tempfile.gettempdir()) / "covey-benchmarks" / "starts"
Row = Mapping[str, Any]
STEPS, EVERY, LONGEST, TEST = 40, 20, 24, 200
SUPERVISED, BATCH, KNOWS = 30, 16, 0.4
"""Steps and rows a step of supervised learning; what a base model gets right by its last number."""
TAGGED = 20
"""Of how many texts that a base model reads one is tagged."""
ARMS = {
    "random weights": "has read nothing",
    "base": "plain solutions, one in twenty tagged",
    "base, then supervised": f"the same, then {SUPERVISED * BATCH} tagged worked answers",
}
"""Arm -> what its model has read before reinforcement."""
RATES: Mapping[str, Row] = {
    "lr 5e-4, no KL": {"algorithm": {"name": "grpo", "kl": None}, "train": {"lr": 5e-4}},
    "lr 2e-4, KL 0.05": {"algorithm": {"name": "grpo", "kl": {"coef": 0.05}}, "train": {"lr": 2e-4}},
}
"""How boldly all arms are reinforced; what suits a start that knows little can ruin one that knows more."""
LAST_NUMBER = [{"math_answer": {"rule": "last_number"}}]


def plain(row: Row) -> str:
    """A worked answer as running text.

    >>> plain({"completion": "<think>7+8=5 5+9=4</think><answer>4</answer>", "answer": "4"})
    '7+8=5, 5+9=4. The answer is 4'
    """
    steps = str(row["completion"]).removeprefix("<think>").split("</think>")[0]
    return f"{steps.replace(' ', ', ')}. The answer is {row['answer']}"


def write_texts() -> Path:
    """The task's problems with solutions as a base model reads them; -> the file."""
    rows = [json.loads(line) for line in (FOLDER / "train.jsonl").read_text().splitlines()]
    rng, file = random.Random(1), FOLDER / "base.jsonl"
    lines = [row if rng.random() < 1 / TAGGED else {**row, "completion": plain(row)} for row in rows]
    file.write_text("".join(json.dumps(row) + "\n" for row in lines))
    return file


def random_weights(seed: int) -> Path:
    """What every arm begins as, with one tokenizer for all."""
    folder = FOLDER / f"random-{seed}"
    if not (folder / "config.json").exists():
        rows = [json.loads(line) for line in (FOLDER / "train.jsonl").read_text().splitlines()]
        texts = [row["prompt"] + text for row in rows for text in (row["completion"], plain(row))]
        tokenizer = build_tokenizer(texts, vocab_size=300)
        build_model(tokenizer, seed, context=256, hidden=64, layers=2).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def taught(name: str, seed: int, model: Path, texts: Path, **own: Any) -> Path:
    """A model that has gone on from another with supervised learning."""
    folder = FOLDER / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}"
    if not (folder / "result.json").exists():
        config = {
            "model": str(model), "method": "sft", "output": str(folder),
            "data": {"train": str(texts), "test": str(FOLDER / "test.jsonl")},
        }  # fmt: skip
        quiet(covey.train, **merged(merged(settings_of(LONGEST, seed), config), own))
    return folder / "final"


def base_model(seed: int) -> Path:
    """Pretrained until it knows some arithmetic, in whatever form it says so."""
    own = {
        "rewards": LAST_NUMBER,
        "train": {"steps": 2000, "lr": 2e-3, "warmup_steps": 10, "stop_at": KNOWS},
        "eval": {"every": 10, "problems": 100, "samples": 1},
    }
    return taught("base", seed, random_weights(seed), write_texts(), **own)


def start_of(arm: str, seed: int) -> Path:
    """The model that an arm's reinforcement begins with."""
    write_rows(FOLDER, sum_row)
    if arm == "random weights":
        return random_weights(seed)
    if arm == "base":
        return base_model(seed)
    train = {"steps": SUPERVISED, "lr": 5e-4, "batch_size": BATCH}
    texts, evaluated = FOLDER / "train.jsonl", {"every": 0, "problems": 8}
    return taught(arm, seed, base_model(seed), texts, train=train, eval=evaluated)


def config_of(arm: str, rate: str, seed: int, start: Path) -> dict[str, Any]:
    """The reinforcement of an arm: the same for all but for where it begins."""
    number = list(RATES).index(rate)
    own = {
        "model": str(start),
        "output": str(FOLDER / f"rl-{list(ARMS).index(arm)}-{seed}{f'-{number}' if number else ''}"),
        "data": {part: str(FOLDER / f"{part}.jsonl") for part in ("train", "test")},
        "algorithm": RATES[rate]["algorithm"],
        "rollout": RL["rollout"],
        "train": {**RL["train"], "steps": STEPS, **RATES[rate]["train"]},
        "eval": {"every": EVERY, "problems": TEST, "samples": 2},
    }
    return merged(settings_of(LONGEST, seed), own)


@dataclass
class Curve:
    """A run: what had been sampled by each held-out evaluation."""

    completions: list[float]
    evaluations: list[Evaluation]
    paid: list[float]
    """Of the groups, the fraction that teaches, by step."""


def run(arm: str, rate: str, seed: int) -> Curve:
    """An arm with a seed, unless that has been done."""
    settings = config_of(arm, rate, seed, start_of(arm, seed))
    folder = Path(settings["output"])
    ended, stopped = folder / "result.json", folder / "nothing-to-teach.txt"
    if not (ended.exists() or stopped.exists()):
        try:
            quiet(covey.train, **settings)
        except GuardStop as said:  # not one group was ever paid: its model is the one that it began with
            stopped.write_text(str(said))
    return curve(folder)


def curve(folder: Path) -> Curve:
    """What a run's logs say."""
    metrics = records(folder, "metrics")
    sampled = np.cumsum([0.0, *(m["groups/count"] * RL["rollout"]["group_size"] for m in metrics)])
    evals = records(folder, "evals")
    if evals[-1]["step"] < len(metrics):  # stopped at its last step, with the weights it had
        evals.append({**evals[-1], "step": len(metrics)})
    return Curve(
        [float(sampled[e["step"]]) for e in evals],
        [Evaluation.from_record(e) for e in evals],
        [1 - m["groups/dead"] for m in metrics],
    )


def rates(curves: Sequence[Curve], at: int, what: str) -> np.ndarray:
    """(S, n) accuracy by seed and problem at an evaluation."""
    found = [c.evaluations[at] for c in curves]
    return np.stack([e.pass_rate if what == "sampled" else e.greedy.astype(float) for e in found])


def percent(values: np.ndarray) -> str:
    """A mean with its interval over seeds and problems."""
    return str(over_seeds(values)).replace(" % ", " ")


def table(found: Mapping[str, Sequence[Curve]]) -> str:
    """Markdown: an arm a row, less `base`."""
    heads = ("start", "sampled before, %", "sampled after, %", "greedy after, %", "sampled, less base")
    heads = (*heads, "groups that teach, first and last ten steps", "has read before")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, curves in found.items():
        after = rates(curves, -1, "sampled")
        less = ""
        if name != "base" and "base" in found:
            less = points(over_seeds(after - rates(found["base"], -1, "sampled"), -1.0))
        teach = [np.mean([np.mean(part) for part in parts]) for parts in
                 ([c.paid[:10] for c in curves], [c.paid[-10:] for c in curves])]  # fmt: skip
        cells = (
            name, percent(rates(curves, 0, "sampled")), percent(after), percent(rates(curves, -1, "greedy")),
            less, f"{teach[0]:.0%}, {teach[1]:.0%}", ARMS[name],
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def picture(found: Mapping[str, Mapping[str, Sequence[Curve]]]) -> str:
    """A panel an arm and rate, a line a seed."""
    panels = []
    for rate, arms in found.items():
        for name, curves in arms.items():
            accuracy = [[100 * float(e.pass_rate.mean()) for e in c.evaluations] for c in curves]
            lines = [Line("", c.completions, y) for c, y in zip(curves, accuracy, strict=True)]
            panels.append(Panel(f"{name}, {rate.split(',')[0]}", lines, "completions", " %", bounds=(0, 100)))
    return chart(panels, "Held-out accuracy over sampled completions: a start a panel, a seed a line")


def report(found: Mapping[str, Mapping[str, Sequence[Curve]]], seeds: int) -> str:
    """The page of results."""
    first = next(iter(next(iter(found.values())).values()))[0]
    about = (
        f"{seeds} seeds; a Qwen3 of width 64 with 2 layers; {STEPS} steps of GRPO, "
        f"{first.completions[-1]:,.0f} sampled completions for every arm. Accuracy by the answer in tags on "
        f"{TEST} held-out problems, two samples each, with 95 % intervals over seeds and problems; "
        "differences are paired by both. A group teaches if its rewards differ. Random weights are run once: "
        "whatever the rate, nothing was paid, so that no weight has moved."
    )
    tables = "\n\n".join(f"## {rate}\n\n{table(arms)}" for rate, arms in found.items())
    return (
        f"# Where reinforcement begins\n\n{machine('starts')}\n\n{about}\n\n{tables}\n\n"
        "![Held-out accuracy over sampled completions](starts.svg)\n"
    )


def main() -> None:
    """Run what is left, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/starts.{md,svg}")
    given = parser.parse_args()
    found: dict[str, dict[str, list[Curve]]] = {rate: {} for rate in RATES}
    for seed, rate, name in product(given.seeds, RATES, given.only):
        if name == "random weights" and rate != next(iter(RATES)):
            continue
        own = run(name, rate, seed)
        found[rate].setdefault(name, []).append(own)
        print(name, rate, seed, *(f"{e.pass_rate.mean():.2f}" for e in own.evaluations), flush=True)
    page = report(found, len(given.seeds))
    print(page)
    if given.write:
        (RESULTS / "starts.md").write_text(page)
        (RESULTS / "starts.svg").write_text(picture(found))


if __name__ == "__main__":
    main()
