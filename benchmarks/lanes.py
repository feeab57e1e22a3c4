"""The lanes side by side at equal tokens: GRPO, Dr. GRPO, PPO, DPO on own pairs, rejection sampling.

    python benchmarks/lanes.py [--seeds 0 1 2] [--only NAME ...] [--write]

Two tasks, one cold start of 0.1M weights for each task and seed, from which every lane goes on. Those that
sample as they learn take 30 steps of 64 completions; the others are given as many completions of the cold
start at once, and train on what they keep of them until as many tokens went through the model as GRPO has
trained. Held-out accuracy is measured once, at the end, on the same 300 problems. CPU seconds are of one
thread and of training alone. Runs are kept in covey-benchmarks/lanes of the temporary folder,
so that the same command goes on after an
interruption. With --write the tables go to benchmarks/results/lanes.md, and the memory by role to
src/covey/insight/memory_of_models.yaml, which `covey recommend` and the lab read.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import io
import json
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

import covey
from covey.insight.stages import points
from covey.models.tiny import build_model, build_tokenizer
from covey.runs.estimates import Evaluation, over_seeds
from covey.tasks.sums import worked
from presets import RESULTS, ROOT

FOLDER = Path(tempfile.gettempdir()) / "covey-benchmarks" / "lanes"
MEASURED = ROOT / "src" / "covey" / "insight" / "memory_of_models.yaml"
STEPS, COMPLETIONS, TEST = 30, 64, 300
REWARDS = [{"math_answer": {"rule": "answer_tag"}}, {"answer_format": 0.1}]
ROLES = ("weights", "gradient", "optimizer", "reference", "critic", "reward_models")
Row = Mapping[str, Any]


def sum_row(rng: random.Random) -> dict[str, Any]:
    """Three digits to add, of every partial sum the last digit."""
    return worked([rng.randint(0, 9) for _ in range(3)], modulus=10)


def reversal_row(rng: random.Random, count: int = 5) -> dict[str, Any]:
    """Some digits to write backwards."""
    digits = "".join(rng.choice("0123456789") for _ in range(count))
    return {"prompt": f"{digits}>", "answer": digits[::-1], "completion": f"<answer>{digits[::-1]}</answer>"}


TASKS = {"sums": (sum_row, 24), "reversal": (reversal_row, 16)}
"""name -> how a problem is made, and the longest answer in tokens."""
RL: Row = {
    "rollout": {"group_size": 8, "prompts_per_step": COMPLETIONS // 8},
    "train": {"steps": STEPS, "lr": 5e-4, "warmup_steps": 3, "updates_per_batch": 4},
}
OF_PPO: Row = {
    "rollout": {"group_size": 4, "prompts_per_step": COMPLETIONS // 4},
    "train": RL["train"],
}


def ppo(trunk: str, lr: float, **critic: Any) -> dict[str, Any]:
    """A PPO whose critic is on a trunk."""
    return {
        "name": "ppo",
        "kl": {"coef": 0.1},
        "advantage": {"lam": 1.0},
        "critic": {"trunk": trunk, "lr": lr, "lam": 1.0, **critic},
    }


LANES: Mapping[str, Row] = {
    "grpo": {**RL, "algorithm": {"name": "grpo", "kl": {"coef": 0.1}}},
    "dr_grpo": {**RL, "algorithm": "dr_grpo"},
    "ppo_head": {**OF_PPO, "algorithm": ppo("policy", 1e-3, pull=0.5)},
    "ppo_network": {**OF_PPO, "algorithm": ppo("own", 1e-3)},
    "dpo": {"method": "dpo", "loss": {"beta": 0.3}, "train": {"lr": 2e-4, "batch_size": 16}},
    "rejection_sampling": {"method": "sft", "train": {"lr": 5e-4, "batch_size": 16}},
}  # fmt: skip
COLLECTS = {"dpo": "pairs", "rejection_sampling": "rejection_sampling"}


def quiet(call: Any, /, **settings: Any) -> Any:
    """Without a word."""
    with contextlib.redirect_stdout(io.StringIO()):
        return call(quiet=True, **settings)


def records(run: Path, stream: str) -> list[dict[str, Any]]:
    """A stream of a run."""
    return [json.loads(line) for line in (run / f"{stream}.jsonl").read_text().splitlines()]


def write_data(task: str) -> Path:
    """Problems of a task, none of them in both files; -> their folder."""
    return write_rows(FOLDER / task, TASKS[task][0])


def write_rows(folder: Path, make: Callable[[random.Random], dict[str, Any]]) -> Path:
    """A thousand problems, none of them in both files; -> the folder."""
    rng, rows = random.Random(0), dict[str, dict[str, Any]]()
    while len(rows) < 1000:
        row = make(rng)
        rows.setdefault(row["prompt"], row)
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("test", list(rows.values())[:TEST]), ("train", list(rows.values())[TEST:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return folder


def settings_of(longest: int, seed: int) -> dict[str, Any]:
    """What all runs with answers of at most so many tokens have in common."""
    return {
        "seed": seed,
        "threads": 1,
        "rewards": REWARDS,
        "rollout": {"max_tokens": longest},
        "train": {"save_every": 10_000},
        "guards": {"dead_steps": 0, "kl_act": None, "kl_stop": None},
    }


def merged(base: Row, over: Row) -> dict[str, Any]:
    """Sections of both; what is said last wins."""
    both = {k: {**base[k], **over[k]} for k in over if isinstance(over[k], dict) and k in base}
    return {**base, **over, **both}


def cold_start(data: Path, longest: int, seed: int, share: float = 0.2) -> Path:
    """A small model that has seen answers of at most so many tokens until it solves that share, nearly."""
    folder, model = data / f"cold-{seed}", data / f"random-{seed}"
    if not (folder / "result.json").exists():
        rows = [json.loads(line) for line in (data / "train.jsonl").read_text().splitlines()]
        tokenizer = build_tokenizer([r["prompt"] + r["completion"] for r in rows], vocab_size=300)
        build_model(tokenizer, seed, context=256, hidden=64, layers=2).save_pretrained(model)
        tokenizer.save_pretrained(model)
        own = {
            "model": str(model), "method": "sft", "output": str(folder),
            "data": {"train": str(data / "train.jsonl"), "test": str(data / "test.jsonl")},
            "train": {"steps": 2000, "lr": 2e-3, "warmup_steps": 10, "stop_at": share},
            "eval": {"every": 10, "problems": 100, "samples": 1},
        }  # fmt: skip
        quiet(covey.train, **merged(settings_of(longest, seed), own))
    return folder / "final"


def tokens_trained(run: Path, group: int) -> int:
    """Of all completions that a run has sampled, each once."""
    return round(sum(m["length/mean"] * m["groups/count"] * group for m in records(run, "metrics")))


def collected(task: str, seed: int, method: str, config: Row) -> Path:
    """As many completions of the cold start as the other lanes sample, and what a lane keeps of them."""
    folder = FOLDER / task / f"collected-{method}-{seed}"
    if not (folder / "result.json").exists():
        own = {"method": method, "output": str(folder), "rollout": RL["rollout"], "train": {"steps": STEPS}}
        quiet(covey.train, **merged(config, own))
    return folder / "examples.jsonl"


def run_lane(name: str, task: str, seed: int) -> dict[str, Any]:
    """A lane from a cold start: what came of it and what it took."""
    folder, data, longest = FOLDER / task / f"{name}-{seed}", FOLDER / task, TASKS[task][1]
    cached = folder / "lane.json"
    if cached.exists():
        return json.loads(cached.read_text())
    model = str(cold_start(data, longest, seed))
    base = {**settings_of(longest, seed), "model": model, "data": {"train": str(data / "train.jsonl")}}
    config, generated = merged(base, LANES[name]), None
    began = time.process_time()
    if name in COLLECTS:
        examples = collected(task, seed, COLLECTS[name], base)
        generated = tokens_trained(examples.parent, 8)
        rows = [json.loads(line) for line in examples.read_text().splitlines()]
        budget = tokens_trained(FOLDER / task / f"grpo-{seed}", 8)
        answers = sum(1 + ("rejected" in row) for row in rows) / len(rows)
        batch = config["train"]["batch_size"]
        each = batch * answers * generated / (STEPS * COMPLETIONS)
        config = merged(config, {"data": {"train": str(examples)}, "train": {"steps": round(budget / each)}})
    sampled = time.process_time()
    quiet(covey.train, **config, output=str(folder))
    ended = time.process_time()
    files = {part: str(data / f"{part}.jsonl") for part in ("train", "test")}
    settings = {"data": files, "eval": {"problems": TEST, "samples": 2}}
    base = {**settings_of(longest, seed), **settings}
    found = quiet(covey.evaluate, run=str(folder / "final"), **base).record()
    metrics = records(folder, "metrics")
    groups = config["rollout"].get("group_size")
    lane = {
        "steps": len(metrics),
        "generated": generated or tokens_trained(folder, groups),
        "sampling": sampled - began,
        "seconds": ended - sampled,
        "memory": memory_in(folder),
        "explained": float(np.mean([m.get("value/explained_variance") or 0.0 for m in metrics[-20:]])),
        "before": evaluated_once(Path(model).parent, base),
        "after": found,
    }  # fmt: skip
    cached.write_text(json.dumps(lane))
    return lane


def memory_in(run: Path) -> dict[str, float]:
    """MiB by role, at the most."""
    laps = records(run, "timings")
    roles = (*ROLES, "activations", "sampling")
    return {role: max(lap[f"memory/{role}_mib"] for lap in laps) for role in roles}


def memory_only() -> dict[str, dict[str, float]]:
    """What two variants take, in three steps each: adapters, and PPO on the reward of a model."""
    task = next(iter(TASKS))
    data, longest = FOLDER / task, TASKS[task][1]
    files = {"train": str(data / "train.jsonl")}
    base = {**settings_of(longest, 0), "model": str(cold_start(data, longest, 0)), "data": files}
    pairs = collected(task, 0, "pairs", base)
    judge, found = FOLDER / "judge", {}
    few = {"train": {"steps": 3}}
    if not (judge / "final").exists():
        own = {"method": "reward_model", "output": str(judge), "data": {"train": str(pairs)}}
        quiet(covey.train, **merged(merged(base, own), few))
    judged = {"rewards": [{"reward_model": {"model": str(judge / "final")}}]}
    variants = {"lora": {**LANES["dr_grpo"], "lora": {"rank": 4}}, "ppo_reward_model": LANES["ppo_network"]}
    for name, lane in variants.items():
        folder = FOLDER / name
        if not (folder / "result.json").exists():
            own = merged(merged(base, lane), few) | (judged if name == "ppo_reward_model" else {})
            quiet(covey.train, **own, output=str(folder))
        found[name] = in_weights([memory_in(folder)])
    return found


def evaluated_once(cold: Path, settings: Row) -> dict[str, Any]:
    """The held-out accuracy of a cold start."""
    file = cold / "before.json"
    if not file.exists():
        found = quiet(covey.evaluate, run=str(cold / "final"), **settings)
        file.write_text(json.dumps(found.record()))
    return json.loads(file.read_text())


def rates(lanes: Sequence[Row], when: str, what: str = "sampled") -> np.ndarray:
    """(S, n) held-out accuracy by problem."""
    found = [Evaluation.from_record(lane[when]) for lane in lanes]
    return np.stack([e.pass_rate if what == "sampled" else e.greedy.astype(float) for e in found])


def accuracy_table(found: Mapping[tuple[str, str], Sequence[Row]], task: str) -> list[str]:
    """Markdown: what came of each lane, less GRPO on the same seeds and problems."""
    heads = ("lane", "sampled, %", "greedy, %", "sampled, less GRPO", "CPU s a step", "CPU s in all")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    first = rates(next(iter(v for (t, _), v in found.items() if t == task)), "before")
    lines.append(f"| cold start | {over_seeds(first)} | | | | |".replace(" % ", " "))
    for (own, name), lanes in found.items():
        if own != task:
            continue
        after = rates(lanes, "after")
        less = "" if name == "grpo" else points(over_seeds(after - rates(found[task, "grpo"], "after"), -1.0))
        seconds = [lane["seconds"] / lane["steps"] for lane in lanes]
        whole = [lane["seconds"] + lane["sampling"] for lane in lanes]
        cells = (
            name, str(over_seeds(after)).replace(" % ", " "),
            str(over_seeds(rates(lanes, "after", "greedy"))).replace(" % ", " "),
            less, f"{np.median(seconds):.2f}", f"{np.median(whole):.0f}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def memory_of(found: Mapping[tuple[str, str], Sequence[Row]], name: str) -> dict[str, float]:
    """Of a lane, the most of all its runs."""
    return in_weights([lane["memory"] for (_, own), lanes in found.items() if own == name for lane in lanes])


def in_weights(measured: Sequence[Row]) -> dict[str, float]:
    """By role in multiples of the policy's weights."""
    return {role: round(max(m[role] / m["weights"] for m in measured), 2) for role in measured[0]}


def memory_table(taken: Mapping[str, Row]) -> list[str]:
    """Markdown: multiples of the policy's weights."""
    heads = (
        "lane",
        *(role.replace("_", " ") for role in ROLES),
        "together",
        "models",
        "activations",
        "sampling",
    )
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, own in taken.items():
        models = 1 + sum(own[role] >= 0.9 for role in ("reference", "critic", "reward_models"))
        cells = [f"{own[role]:g}" for role in ROLES]
        cells += [f"{sum(own[r] for r in ROLES):.1f}", str(models)]
        cells += [f"{own[role]:.1f}" for role in ("activations", "sampling")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def machine(name: str) -> str:
    """When and where a benchmark of this folder ran, and by which command."""
    return (
        f"{dt.date.today()}, {platform.machine()}, {os.cpu_count()} cores shared with other programs, one "
        f"thread, Python {platform.python_version()}, torch {torch.__version__}. "
        f"`python benchmarks/{name}.py {' '.join(sys.argv[1:])}`"
    )


def report(found: Mapping[tuple[str, str], Sequence[Row]], taken: Mapping[str, Row], seeds: int) -> str:
    """The page of results."""
    about = (
        f"{seeds} seeds; a Qwen3 of width 64 with 2 layers; {STEPS} steps of {COMPLETIONS} completions. "
        f"Accuracy on {TEST} held-out problems with 95 % intervals over seeds and problems; seconds are "
        "medians over the runs."
    )
    lines = ["# Lanes at equal tokens", "", machine("lanes"), "", about]
    for task in dict.fromkeys(task for task, _ in found):
        tokens = [lane["generated"] for (t, _), lanes in found.items() if t == task for lane in lanes]
        lines += ["", f"## {task}", "", *accuracy_table(found, task), ""]
        lines.append(f"Generated tokens of a run: {min(tokens):,} to {max(tokens):,}.")
    lines += ["", "## Memory by role, measured", "", "In multiples of the policy's weights in float32."]
    return "\n".join([*lines, "", *memory_table(taken), ""])


def main() -> None:
    """Run what is left, print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--only", nargs="+", choices=LANES, default=list(LANES))
    parser.add_argument("--write", action="store_true", help="write results/lanes.md and the package's table")
    arguments = parser.parse_args()
    found = dict[tuple[str, str], list[Row]]()
    for seed, task in product(arguments.seeds, arguments.tasks):
        write_data(task)
        for name in arguments.only:
            lane = run_lane(name, task, seed)
            found.setdefault((task, name), []).append(lane)
            ends = [f"{rates([lane], when).mean():.2f}" for when in ("before", "after")]
            print(task, name, seed, *ends, f"{lane['seconds']:.0f} s", lane["steps"], flush=True)
    own = dict.fromkeys(name for _, name in found)
    taken = {name: memory_of(found, name) for name in own} | memory_only()
    text = report(found, taken, len(arguments.seeds))
    print(text)
    if arguments.write:
        (RESULTS / "lanes.md").write_text(text)
        MEASURED.write_text(
            "# Written by benchmarks/lanes.py: memory by role, measured, in multiples of the policy's\n"
            "# weights in float32; activations and sampling are those of a tiny model with short answers.\n"
            + yaml.safe_dump(taken, sort_keys=False)
        )


if __name__ == "__main__":
    main()
