"""What the order of problems is worth, and what credit finer than the completion is worth.

    python benchmarks/curriculum.py [--seeds 0 1 2] [--only NAME ...] [--write]

One task whose problems are easy to hardly solvable: two to eight digits to write backwards.
From one cold start for each seed, orders are compared at equal completions, what a pre-pass and filtered
groups take included: as shuffled, easy or hard ones first, by measured pass rates, and what covey offers
besides; GRPO and PPO with and without a curriculum. Estimators by token are compared with GRPO at equal
generated tokens, those of continuations included. Held-out accuracy is that of the evaluation nearest to the
budget. Runs are kept in covey-benchmarks/curriculum of the temporary folder,
so that the same command goes on after an interruption. With
--write the tables and curves go to benchmarks/results/curriculum.{md,svg}.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import covey
from covey.estimates import Evaluation, over_seeds
from covey.insight.chart import Line, Panel, chart
from covey.insight.stages import points
from lanes import cold_start, machine, merged, ppo, quiet, records, reversal_row, settings_of
from presets import RESULTS

FOLDER = Path(tempfile.gettempdir()) / "covey-benchmarks" / "curriculum"
LEVELS = (2, 3, 4, 6, 8)
"""Digits to write backwards."""
COLD, TRAINED, TEST = 150, 40, 40
"""Problems of a level: of the cold start, of these in the runs, held out. With two digits there are 100."""
LONGEST, STEPS, EVERY, PREPASS, BAR = 20, 30, 5, 4, 0.4
COMPLETIONS = 128 * STEPS
Row = Mapping[str, Any]
GRPO: Row = {
    "algorithm": {"name": "grpo", "kl": None},
    "rollout": {"group_size": 8, "prompts_per_step": 16},
    "train": {"steps": STEPS, "lr": 3e-4, "warmup_steps": 3, "updates_per_batch": 2},
    "eval": {"every": EVERY, "problems": TEST * len(LEVELS), "samples": 2},
}
PPO: Row = {
    "algorithm": {**ppo("own", 1e-3), "kl": None},
    "rollout": {"group_size": 4, "prompts_per_step": 32},
}


def in_stages(*levels: Sequence[int]) -> dict[str, Any]:
    """A third of the steps on each of some levels."""
    third = {"train": {**GRPO["train"], "steps": STEPS // len(levels)}}
    return {"stages": [{"data": {"train": part_name(part)}, **third} for part in levels]}


def part_name(levels: Sequence[int]) -> str:
    """Of the file with these levels."""
    return str(FOLDER / f"train-{'-'.join(map(str, levels))}.jsonl")


def rollout(**settings: Any) -> dict[str, Any]:
    """GRPO with other settings of the rollout."""
    return {"rollout": {**GRPO["rollout"], **settings}}


def algorithm(name: str, **axes: Any) -> dict[str, Any]:
    """Another algorithm, as free of a KL."""
    return {"algorithm": {"name": name, "kl": None, **axes}}


EASY, MIDDLE, HARD = (2, 3), (4,), (6, 8)
FRONTIER = {"curriculum": "frontier"}
ORDERS: Mapping[str, tuple[Row, str]] = {
    "shuffled": ({}, "the default"),
    "easy_first": (in_stages(EASY, MIDDLE, HARD), "three stages: 2 and 3 digits, 4, 6 and 8"),
    "hard_first": (in_stages(HARD, MIDDLE, EASY), "the same, the other way round"),
    "frontier": (rollout(**FRONTIER), "`rollout.curriculum: frontier`"),
    "frontier_prepass": (
        rollout(**FRONTIER, prepass=PREPASS),
        f"the same, `rollout.prepass: {PREPASS}`",
    ),
    "adapt": (rollout(adapt_group_size=True, prepass=PREPASS), "`rollout.adapt_group_size`, same pre-pass"),
    "dynamic_sampling": (
        {**algorithm("grpo", filter="mixed"), "train": {**GRPO["train"], "steps": 30}},
        "`algorithm.filter: mixed`",
    ),
    "ppo": (PPO, "a critic instead of groups, as shuffled"),
    "ppo_frontier": (merged(PPO, {"rollout": FRONTIER}), "the same, `rollout.curriculum: frontier`"),
}  # fmt: skip
VINE = {"split_by": "unlikely", "most": 4, "continuations": 3}
BY_VINE = {
    **algorithm("vine_ppo", advantage=VINE),
    **rollout(group_size=4),
    "train": {**GRPO["train"], "steps": 15},
}
CREDIT: Mapping[str, tuple[Row, str]] = {
    "shuffled": ({}, "GRPO, the same runs as above"),
    "dr_grpo": (algorithm("dr_grpo"), "one advantage a completion, too; no std, constant length"),
    "optimal_token_baseline": (
        algorithm("dr_grpo", advantage="optimal_token_baseline"), "the same with a baseline for each token",
    ),
    "grpo_prefix_tree": (algorithm("grpo_prefix_tree"), "values of beginnings that siblings share"),
    "vine_ppo": (BY_VINE, "groups of 4; from 3 cuts before unlikely tokens 3 continuations each"),
}  # fmt: skip


@dataclass
class Curve:
    """One run: its held-out evaluations, and what had been sampled by each."""

    steps: list[int] = field(default_factory=list)
    completions: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    """Generated, those of continuations and of filtered groups included."""
    evaluations: list[Evaluation] = field(default_factory=list)
    dead: list[float] = field(default_factory=list)
    """Fraction of the groups, by step."""

    def near(self, budget: float, what: str) -> int:
        """The evaluation nearest to a budget of completions or tokens."""
        return int(np.argmin([abs(spent - budget) for spent in getattr(self, what)]))

    def to_bar(self, budget: float, what: str) -> float | None:
        """What was spent when sampled accuracy reached the bar; None: not within the budget."""
        within = self.evaluations[: self.near(budget, what) + 1]
        return next((getattr(self, what)[i] for i, e in enumerate(within) if e.pass_rate.mean() >= BAR), None)


def write_problems() -> None:
    """Problems of all levels in turn, none of them both held out and trained on."""
    rng, of = random.Random(0), dict[int, list[dict[str, Any]]]()
    for n in LEVELS:
        rows = dict[str, dict[str, Any]]()
        while len(rows) < min(TEST + COLD, 10**n):
            row = reversal_row(rng, n)
            rows.setdefault(row["prompt"], row)
        of[n] = list(rows.values())
    FOLDER.mkdir(parents=True, exist_ok=True)
    parts = {"test": [of[n][:TEST] for n in LEVELS], "train": [of[n][TEST:] for n in LEVELS]}
    for part in (LEVELS, EASY, MIDDLE, HARD):
        parts[Path(part_name(part)).stem] = [of[n][TEST : TEST + TRAINED] for n in part]
    for name, columns in parts.items():
        most = max(map(len, columns))
        lines = [json.dumps(rows[i]) + "\n" for i in range(most) for rows in columns if i < len(rows)]
        (FOLDER / f"{name}.jsonl").write_text("".join(lines))


def config_of(name: str, seed: int, cold: Path) -> dict[str, Any]:
    """An arm from a cold start."""
    files = {"train": part_name(LEVELS), "test": str(FOLDER / "test.jsonl")}
    own = {"model": str(cold), "output": str(FOLDER / f"{name}-{seed}"), "data": files}
    settings = merged(merged(settings_of(LONGEST, seed), merged(GRPO, {**ORDERS, **CREDIT}[name][0])), own)
    settings["rollout"]["max_tokens"], settings["train"]["save_every"] = LONGEST, 10_000
    return settings


def run(name: str, seed: int) -> Curve:
    """An arm from the seed's cold start, unless that has been done; its learning curve."""
    settings = config_of(name, seed, cold_start(FOLDER, LONGEST, seed, share=0.3))
    folder, sampling = Path(settings["output"]), settings["rollout"]
    ended = [folder / "result.json", folder / f"{len(settings.get('stages', ()))}-rl" / "result.json"]
    if not any(file.exists() for file in ended):
        quiet(covey.train, **settings)
    return curve(folder, sampling["group_size"], sampling.get("prepass", 0) * TRAINED * len(LEVELS))


def curve(folder: Path, group: int, before: float) -> Curve:
    """What a run's logs say, its stages one after the other; ``before``: completions of a pre-pass."""
    found, steps, completions, tokens = Curve(), 0, before, 0.0
    for stage in sorted(folder.glob("[0-9]-rl")) or [folder]:
        evals = {r["step"]: Evaluation.from_record(r) for r in records(stage, "evals")}
        metrics = records(stage, "metrics")
        tokens = tokens or before * metrics[0]["length/mean"]
        for done in range(len(metrics) + 1):
            if done in evals:
                found.steps.append(steps + done)
                found.completions.append(completions)
                found.tokens.append(tokens)
                found.evaluations.append(evals[done])
            if done < len(metrics):
                now = metrics[done]
                completions += now["groups/count"] * group
                tokens += now["groups/count"] * group * now["length/mean"]
                tokens += now.get("rollout/continued_tokens", 0.0)
                found.dead.append(now["groups/dead"])
        steps += len(metrics)
    return found


def solved(curves: Sequence[Curve], at: Sequence[int]) -> np.ndarray:
    """(L, S, n) sampled accuracy by level, seed and problem, at one evaluation of each run."""
    rates = [c.evaluations[i].pass_rate for c, i in zip(curves, at, strict=True)]
    return np.stack([np.stack([r[k :: len(LEVELS)] for r in rates]) for k in range(len(LEVELS))])


def in_percent(values: np.ndarray) -> list[str]:
    """(L, S, n) -> each level's mean with its interval, and that of all."""
    return [str(over_seeds(v)).replace(" % ", " ") for v in (*values, np.concatenate(values, axis=1))]


def table(
    arms: Mapping[str, tuple[Row, str]],
    found: Mapping[str, Sequence[Curve]],
    what: str,
    against: Mapping[str, str],
) -> str:
    """Markdown at the completions or tokens of 30 shuffled steps: an arm a row, less another arm."""
    heads = ["arm", *(f"{n} digits, %" for n in LEVELS), "all, %", "points, less", f"steps to {BAR:.0%}"]
    heads += [f"{what} to it", "dead groups", "what it is"]
    first = found["shuffled"]
    budgets = [getattr(c, what)[c.near(COMPLETIONS, "completions")] for c in first]
    start = in_percent(solved(first, [0] * len(first)))
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    lines.append(f"| cold start | {' | '.join(start)} | | | | | |")
    at = {n: [c.near(b, what) for c, b in zip(found[n], budgets, strict=True)] for n in arms if n in found}
    for name, ends in at.items():
        own, other = solved(found[name], ends), against.get(name, "shuffled")
        cells, runs = [name, *in_percent(own)], list(zip(found[name], budgets, strict=True))
        less = np.concatenate(own - solved(found[other], at[other]), axis=1)
        cells.append("" if name == other else f"{points(over_seeds(less, -1.0))}, {other}")
        spent = [(c, c.to_bar(b, what)) for c, b in runs]
        steps = [None if b is None else c.steps[getattr(c, what).index(b)] for c, b in spent]
        cells += [
            ", ".join("never" if n is None else f"{n:,.0f}" for n in ns)
            for ns in (steps, [b for _, b in spent])
        ]
        dead = [np.mean(c.dead[: c.steps[i]]) for c, i in zip(found[name], ends, strict=True)]
        lines.append(f"| {' | '.join([*cells, f'{np.mean(dead):.0%}', arms[name][1]])} |")
    return "\n".join(lines)


def picture(found: Mapping[str, Sequence[Curve]]) -> str:
    """A panel an arm, a line a seed: sampled accuracy over what was generated, and where GRPO ended."""
    shuffled = found["shuffled"]
    ends = [c.near(COMPLETIONS, "completions") for c in shuffled]
    bar = 100 * float(solved(shuffled, ends).mean())
    panels = []
    for name, curves in found.items():
        lines = []
        for c, end, first in zip(curves, ends, shuffled, strict=True):
            last = c.near(first.tokens[end], "tokens") + 1
            y = [100 * float(e.pass_rate.mean()) for e in c.evaluations[:last]]
            lines.append(Line("", [t / 1000 for t in c.tokens[:last]], y))
        panels.append(Panel(name, lines, "1000 tokens", " %", bounds=(0, 60), bars=[bar]))
    return chart(panels, "Held-out accuracy over generated tokens: an arm a panel, a seed a line")


def report(found: Mapping[str, Sequence[Curve]], seeds: int) -> str:
    """The page of results."""
    about = (
        f"{seeds} seeds; a Qwen3 of width 64 with 2 layers, cold-started on all levels; {STEPS} steps of "
        f"{COMPLETIONS // STEPS} completions without a KL, lr {GRPO['train']['lr']:g}, two updates a batch; "
        f"{TRAINED} problems of each level to train on, {TEST} held out, two samples each. Intervals are of "
        "95 % over seeds and problems, differences paired by both. Steps to the bar are of each seed, by "
        f"evaluations every {EVERY} steps, until the budget ends."
    )
    orders = table(ORDERS, found, "completions", {"ppo_frontier": "ppo", "ppo": "ppo"})
    by_token = table(CREDIT, found, "tokens", {"optimal_token_baseline": "dr_grpo"})
    return (
        f"# What a curriculum is worth, and credit by token\n\n{machine('curriculum')}\n\n{about}\n\n"
        f"## Orders, at equal completions\n\n{orders}\n\n"
        f"## Credit by token, at equal generated tokens\n\n{by_token}\n\n"
        "![Held-out accuracy over generated tokens](curriculum.svg)\n"
    )


def main() -> None:
    """Run what is left, print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = list(dict.fromkeys([*ORDERS, *CREDIT]))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=known, default=known, metavar="ARM")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/curriculum.{md,svg}")
    given = parser.parse_args()
    write_problems()
    found: dict[str, list[Curve]] = {}
    for seed in given.seeds:
        for name in dict.fromkeys(
            ["shuffled", *(["ppo"] if "ppo_frontier" in given.only else []), *given.only]
        ):
            own = run(name, seed)
            found.setdefault(name, []).append(own)
            ends = [
                f"{own.evaluations[i].pass_rate.mean():.2f}"
                for i in (0, own.near(COMPLETIONS, "completions"))
            ]
            print(name, seed, *ends, flush=True)
    page = report(found, len(given.seeds))
    print(page)
    if given.write:
        (RESULTS / "curriculum.md").write_text(page)
        (RESULTS / "curriculum.svg").write_text(picture(found))


if __name__ == "__main__":
    main()
