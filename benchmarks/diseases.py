"""Sixteen diseases of reinforcement without a critic, each on a task where it happens, and what names it.

    python benchmarks/diseases.py [--only NAME ...] [--seeds 1] [--write]

Each disease is a run, its cure another that differs in one thing; both begin from the same cold start. What
the run finds first must be the disease's true cause, and a cured run must find nothing. Runs are tiny (48
completions a step, a model of 50,000 weights) and kept in covey-benchmarks/diseases of the temporary folder,
so that the same command continues after an interruption; findings are those of today's rules on the records.
With --write the matrix and the pictures go to benchmarks/results/diseases.{md,svg}.
"""

from __future__ import annotations

import argparse
import datetime as dt
import fnmatch
import os
import platform
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, Qwen3Config

from covey.config.load import load_config
from covey.insight.chart import Line, Panel, chart
from covey.insight.findings.settings import settings_of
from covey.insight.findings.table import explain
from covey.models.tiny import build_tokenizer
from covey.rng import key
from covey.runs.folder import read_stream
from covey.runs.reader import load_recorded
from covey.system.console import RunConsole
from covey.system.signals import StopSignal
from covey.training.pipeline import run_pipeline
from covey_verify.errors import ConfigError, CoveyError
from worlds import write_cold_start, write_problems

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FOLDER = Path(tempfile.gettempdir()) / "covey-benchmarks" / "diseases"
OWN = f"{ROOT / 'benchmarks' / 'worlds.py'}:"
Settings = Mapping[str, Any]
ANSWER = {"math_answer": {"rule": "answer_tag"}}
BASE: Settings = {
    "threads": 1,
    "rewards": [ANSWER],
    "algorithm": {"name": "grpo", "kl": None},
    "rollout": {"group_size": 8, "prompts_per_step": 6, "max_tokens": 24, "max_resampling_rounds": 0},
    "train": {"steps": 20, "lr": 3e-4, "save_every": 1000},
    "eval": {"problems": 20, "samples": 1},
    "guards": {"dead_steps": 0, "kl_stop": None},
}


def weighted(reward: str, weight: float, **settings: object) -> dict[str, Any]:
    """An entry of `rewards`."""
    return {reward: {"weight": weight, **settings}}


@dataclass(frozen=True)
class Disease:
    """What goes wrong, and the one thing that mends it."""

    id: str
    what: str
    world: str
    disease: Settings
    cure: Settings
    says: str
    """The finding that is the true cause; `refused` where the config is not accepted."""
    metric: str
    """That the picture shows, and whose mean says whether the disease happened; a pattern."""
    both: Settings | None = None
    """What the two have in common beyond BASE."""
    twin: str = ""
    """The world of the cured run, where that is what differs."""


MEANS = "The metric is the picture's: where it is as small as in the cured run the disease did not happen."
RM = str(FOLDER / "reward_model")
DISEASES: dict[str, Disease] = {
    "length": Disease(
        "S122", "incorrect answers grow, their length dilutes the penalty", "humming", {},
        {"algorithm.reduce": "constant_length"}, "length_bias", "length/incorrect",
        {"rollout.max_tokens": 64, "algorithm.advantage": "reward", "rewards": [f"{OWN}signed"],
         "train.lr": 6e-4, "rollout.group_size": 16},
    ),
    "std": Disease(
        "S123", "dividing by the std prefers very hard prompts", "uneven", {},
        {"algorithm.advantage": "group_centered"}, "std_overweight", "gradient_share/overweight",
        {"rollout.group_size": 64, "rollout.prompts_per_step": 16, "rollout.max_tokens": 32,
         "train.lr": 5e-5},
    ),
    "farming": Disease(
        "S124", "a format is paid more than the answer", "forms",
        {"rewards": [weighted("math_answer", 0.1, rule="answer_tag"), {"answer_format": 1.0}]},
        {"rewards": [weighted("math_answer", 1.0, rule="answer_tag"),
                     weighted("answer_format", 1.0, gated_by="math_answer:correct")]},
        "farmed", "accuracy",
    ),
    "extractor": Disease(
        "S125", "a verdict that finds the answer anywhere", "lists", {"rewards": [f"{OWN}contains"]},
        {"rewards": [ANSWER]}, "fooled", "reward/paid_elsewhere",
        {"rollout.group_size": 16, "rollout.prompts_per_step": 4},
    ),
    "visible_tests": Disease(
        "S126", "programs written for the tests they see", "programs",
        {"rewards": [f"{OWN}visible_tests"]}, {"rewards": [f"{OWN}hidden_tests"]}, "visible_gap",
        "reward/*/gap",
    ),
    "languages": Disease(
        "S127", "another language is right more often", "languages", {},
        {"rewards": [ANSWER, weighted("language_consistency", 1.0)]},
        "mixed_scripts", "text/mixed_scripts", {"rollout.max_tokens": 32},
    ),
    "entropy": Disease(
        "S128", "exploration ends before the task is solved", "lottery", {},
        {"train.lr": 1e-4}, "entropy_collapse", "entropy/sampled",
        {"train.lr": 1e-3, "train.updates_per_batch": 3},
    ),
    "drift": Disease(
        "S129", "a reward that chance decides: far from the start, and nothing gained", "steps", {},
        {"algorithm.kl": 1.0}, "kl_growth", "kl/start",
        {"rewards": [f"{OWN}by_chance"], "algorithm.reduce": "token_mean", "train.lr": 2.5e-3,
         "rollout.max_tokens": 64, "train.steps": 16},
    ),
    "cold": Disease(
        "S130", "the temperature is too low", "mixed", {"rollout.temperature": 0.05}, {}, "temperature",
        "groups/dead", twin="half",
    ),
    "easy": Disease(
        "S130", "all problems are solved", "solved", {}, {}, "too_easy", "groups/dead", twin="half"
    ),
    "hard": Disease(
        "S130", "no problem can be solved", "never", {}, {}, "too_hard", "groups/dead", twin="half"
    ),
    "single": Disease(
        "S130", "groups of one", "half", {"rollout.group_size": 1}, {}, "refused", "groups/dead"
    ),
    "wide_groups": Disease(
        "S131", "large groups spread the ratio over inner epochs", "rare",
        {"train.inner_epochs": 8}, {}, "wide_ratios", "ratio/q99",
        {"train.lr": 1e-3, "rollout.group_size": 32, "rollout.prompts_per_step": 2},
    ),
    "outlier": Disease(
        "S132", "one outlier decides a group of four", "rare",
        {"rollout.group_size": 4, "rollout.prompts_per_step": 12},
        {"rollout.group_size": 16, "rollout.prompts_per_step": 3}, "small_group", "groups/one_against_all",
    ),
    "blame": Disease(
        "S133", "harmless words are blamed with the answer", "preamble", {},
        {"algorithm.advantage": "prefix_tree"}, "blame_on_prefix", "gradient_share/shared_prefix",
    ),
    "noisy_steps": Disease(
        "S134", "the judge of steps is wrong about a fifth", "steps", {"scoring.noise": 0.2}, {},
        "noisy_steps", "steps/inconsistent",
        {"algorithm": {"name": "grpo_process", "kl": None, "advantage": {"credit": "own_step"}},
         "rewards": [ANSWER, f"{OWN}named_digits"]},
    ),
    "reward_model": Disease(
        "S135", "a model's taste is paid", "guess",
        {"rewards": [weighted("math_answer", 0.1, rule="answer_tag"),
                     weighted("reward_model", 1.0, model=RM)]},
        {"rewards": [ANSWER]}, "paid_by_model", "accuracy",
    ),
    "dead_weight": Disease(
        "S136", "most prompts are always or never solved", "wasted", {}, {"rollout.curriculum": "frontier"},
        "dead_weight", "groups/dead", {"train.steps": 24},
    ),
}  # fmt: skip


HEALTHY = {
    f"preset {name}": Disease(
        "healthy", f"the preset {name}", "guess", {"algorithm": {"name": name}}, {}, "nothing", "accuracy"
    )
    for name in ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "max_rl", "gdpo")
}
"""Presets as they are, on a task that can be learned: nothing is to be said."""


def merged(base: Settings, over: Settings) -> dict[str, Any]:
    """Return nested settings with others over them, whose dotted keys reach inside."""
    result = {k: dict(v) if isinstance(v, Mapping) else v for k, v in base.items()}
    for dotted, value in over.items():
        section, _, name = dotted.partition(".")
        if name or (isinstance(value, Mapping) and isinstance(result.get(section), dict)):
            result[section] = {**result.get(section, {}), **({name: value} if name else value)}
        else:
            result[section] = value
    return result


def cold(seed: int) -> Path:
    """Where the policy is that the runs of a seed begin from."""
    return FOLDER / f"cold-{seed}"


def cold_start(seed: int) -> None:
    """The policy that all runs of a seed begin from, and the problems of the worlds."""
    folder = cold(seed)
    there = (folder / "sft" / "final").is_dir()
    if not there:
        write_cold_start(folder, seed)
    write_problems(folder)
    if there:
        return
    settings = {
        "seed": seed,
        "model": str(folder / "model"),
        "method": "sft",
        "output": str(folder / "sft"),
        "data": {"train": str(folder / "cold.jsonl")},
        "rollout": {"max_tokens": 64},
        "rewards": [ANSWER],
        "train": {"steps": 600, "lr": 4e-3, "batch_size": 64, "warmup_steps": 5, "schedule": "cosine"},
        "threads": 1,
    }
    run_pipeline(load_config(values=settings), RunConsole(quiet=True), StopSignal())


def config_of(name: str, arm: str, seed: int, output: Path) -> dict[str, Any]:
    """The config of a disease or its cure."""
    case = {**DISEASES, **HEALTHY}[name]
    world = case.twin if case.twin and arm == "cure" else case.world
    own = merged(BASE, case.both or {})
    own = merged(own, case.disease if arm == "disease" else case.cure)
    data = {split: str(cold(seed) / f"{world}-{split}.jsonl") for split in ("train", "test")}
    model = str(cold(seed) / "sft" / "final")
    return {**own, "seed": seed, "model": model, "data": data, "output": str(output)}


def trained(name: str, arm: str, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]], float]:
    """Metrics and findings of a run, and its seconds; a config that is refused is a finding itself."""
    folder = FOLDER / f"{key(str(sorted(config_of(name, arm, seed, FOLDER).items()))):016x}"
    started = time.monotonic()
    if not (folder / "result.json").exists() and not (folder / "ended").exists():
        try:
            settings = config_of(name, arm, seed, folder)
            run_pipeline(load_config(values=settings), RunConsole(quiet=True), StopSignal())
        except ConfigError as error:
            return [], [{"id": "refused", "step": 0, "sentence": str(error), "remedy": ""}], 0.0
        except CoveyError as error:  # a guard has ended it: what was found is written down
            (folder / "ended").write_text(str(error))
    metrics, evals = (read_stream(folder, f"{stream}.jsonl") for stream in ("metrics", "evals"))
    found = explain(metrics, evals, settings_of(load_recorded(folder)))  # by the rules of today
    return metrics, [f.record() for f in found], time.monotonic() - started


def reward_model() -> None:
    """A random classifier: a judge with tastes."""
    if not Path(RM).is_dir():
        torch.manual_seed(0)
        tokenizer = build_tokenizer(["<answer>3</answer>"] * 3)
        config = Qwen3Config(
            vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, head_dim=16, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        config.num_labels = 1
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(5.0)
        model.save_pretrained(RM)
        tokenizer.save_pretrained(RM)


def curve(metrics: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """(steps, values) where there is one."""
    named = [(m["step"], next(iter(fnmatch.filter(m, name)), name)) for m in metrics]
    known = [(int(s), float(m[n])) for m, (s, n) in zip(metrics, named, strict=True) if m.get(n) is not None]
    return [s for s, _ in known], [v for _, v in known]


def main() -> None:
    """Each disease and its cure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=DISEASES, default=list(DISEASES), metavar="NAME")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--presets", action="store_true", help="then nine presets, of which nothing is said")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/diseases.{md,svg}")
    arguments = parser.parse_args()
    for seed in range(arguments.seeds):
        cold_start(seed)
    reward_model()
    rows, sentences, panels, healthy = [], [], [], []
    for name in arguments.only:
        case, lines = DISEASES[name], []
        for seed in range(arguments.seeds):
            metrics, found, seconds = trained(name, "disease", seed)
            twin, quiet, more = trained(name, "cure", seed)
            first = found[0]["id"] if found else "nothing"
            rest = ", ".join(f["id"] for f in found[1:])
            good = "yes" if first == case.says else "**no**"
            said = ", ".join(f["id"] for f in quiet) or "nothing"
            courses = curve(metrics, case.metric), curve(twin, case.metric)
            means = " / ".join(f"{fmean(values):.2g}" for _, values in courses if values)
            rows.append(
                f"| {case.id} | {case.what} | {seed} | {means} | `{first}` | {good} | {rest} | {said} |"
            )
            print(rows[-1], f"{seconds:.0f} s, {more:.0f} s", flush=True)
            if seed == 0 and found:
                line = found[0]["remedy"].replace("\n", " ")
                remedy = f" `{line}`" if line else ""
                sentences.append(
                    f"- {case.id} {name}, step {found[0]['step']}: {found[0]['sentence']}.{remedy}"
                )
            lines += [Line("disease", *courses[0]), Line("cure", *courses[1])]
        lines = [line for line in lines if len(line.x)]
        panels += [Panel(f"{case.id} {case.metric}", lines)] if lines else []
    for name in HEALTHY if arguments.presets else ():
        for seed in range(arguments.seeds):
            metrics, found, seconds = trained(name, "disease", seed)
            said = ", ".join(f"`{f['id']}`" for f in found) or "nothing"
            rates = [metrics[0]["accuracy"], metrics[-1]["accuracy"]]
            healthy.append(f"| {name} | {seed} | {rates[0]:.0%} to {rates[1]:.0%} | {said} |")
            print(healthy[-1], f"{seconds:.0f} s", flush=True)
    page = report(rows, sentences, healthy)
    print(page)
    if arguments.write:
        (RESULTS / "diseases.md").write_text(page)
        label = "A metric of each disease and its cure over the steps"
        (RESULTS / "diseases.svg").write_text(chart(panels, label, across=3, wide=190, high=110))


def report(rows: Sequence[str], sentences: Sequence[str], healthy: Sequence[str]) -> str:
    """The page of results."""
    where = f"{dt.date.today()}, {platform.machine()}, {os.cpu_count()} cores"
    right, quiet = sum("| yes |" in r for r in rows), sum(r.endswith("| nothing |") for r in rows)
    about = (__doc__ or "").split("\n\n")[2].replace("\n", " ")
    heads = ["", "disease", "seed", "mean of its metric, cured", "said first", "true cause", "said later"]
    heads += ["the cured run says"]
    lines = [
        "# Diseases, and the findings that name them",
        f"{where}, Python {platform.python_version()}. `{' '.join(['python', *sys.argv])}`",
        about,
        f"The true cause is said first in {right} of {len(rows)} runs; {quiet} cured runs say nothing.",
        MEANS,
        "\n".join([f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *rows]),
        "What is said first, and the line that mends it:",
        "\n".join(sentences),
    ]
    if healthy:
        heads = ["run", "seed", "correct in training", "said"]
        lines += ["Presets as they are, on a task that can be learned:"]
        lines += ["\n".join([f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *healthy])]
    picture = "![A metric of each disease and its cure over the steps](diseases.svg)"
    return "\n\n".join([*lines, picture]) + "\n"


if __name__ == "__main__":
    main()
