"""Credit finer than the completion held against the truth: what each token really gained, by continuations.

    python benchmarks/credit.py [--seeds 0 1 2] [--tasks NAME ...] [--train] [--write]

Tasks are sums with one step a line; for each seed one model of 0.1M weights that solves some of them. It
answers eight held-out problems eight times each. The truth: from every beginning 64 continuations are drawn
and judged, so that what each token gained is known but for their noise, which is in the table. Estimators see
the same completions. An estimate is counted with the tokens that were generated for it besides these; the
critic's are those it has learned from. Each is also shuffled, among the tokens or steps of its completion:
the control. With --train the models of the first task also learn by four kinds of credit, oracle and control
among them, from as many completions. Results are kept in covey-benchmarks/credit of the temporary folder,
so that the same command goes
on after an interruption. With --write the tables go to benchmarks/results/credit.md.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

import covey
from covey.config.load import load_config
from covey.continuations import Continued, Cut, cut_places, with_segments
from covey.estimates import STUDENT, Estimate, Evaluation, over_seeds
from covey.gathering import score_all
from covey.insight.stages import points
from covey.models.load import load_policy
from covey.models.packing import pack
from covey.models.value_head import load_value_model
from covey.objective.advantages import group_centered
from covey.objective.credit import prefix_tree, process_zscore, segment_difference
from covey.objective.value import gae
from covey.prompts import Prompted, encode
from covey.rewards.base import Rewards, load_rewards
from covey.rewards.scorer import Scorer
from covey.rng import key
from covey.sampling.base import Request, SamplingParams
from covey.sampling.local import LocalSampler
from covey.tasks.source import load_source
from covey.tasks.sums import partial_sums, worked
from covey.types import Completion, Group
from lanes import (
    RL,
    cold_start,
    machine,
    merged,
    ppo,
    quiet,
    records,
    settings_of,
    tokens_trained,
    write_rows,
)
from presets import RESULTS

FOLDER = Path(tempfile.gettempdir()) / "covey-benchmarks" / "credit"
PROBLEMS, GROUP, HALF, SHARE, CRITIC_STEPS = 8, 8, 32, 0.35, 30
"""``HALF`` of the continuations that are the truth; the model is taught until ``SHARE`` is right."""
ORDERS = 100
"""In which the control is shuffled."""
VERDICT = {"math_answer": {"rule": "answer_tag"}}
Row = Mapping[str, Any]


def on_lines(terms: list[int], modulus: int) -> dict[str, Any]:
    """A sum with every step on a line of its own, so that ``split_by: lines`` finds the steps."""
    row = worked(terms, modulus)
    return {**row, "completion": str(row["completion"]).replace(" ", "\n")}


@dataclass(frozen=True)
class Task:
    """Problems, the modulus of their sums, and the longest answer in tokens, with much room."""

    make: Callable[[random.Random], dict[str, Any]]
    modulus: int
    longest: int


TASKS = {
    "last_digit": Task(lambda rng: on_lines([rng.randint(0, 9) for _ in range(3)], 10), 10, 28),
    "sums": Task(lambda rng: on_lines([rng.randint(1, 20) for _ in range(3)], 1000), 1000, 40),
}
VINE = {"lines": {"split_by": "lines", "most": 6, "continuations": 4},
        "unlikely": {"split_by": "unlikely", "most": 4, "continuations": 3},
        "tokens": {"split_by": "tokens", "most": 10_000, "continuations": 4}}  # fmt: skip


@dataclass
class Model:
    """A partly trained policy, its critic, and how its completions are drawn and judged."""

    task: str
    seed: int
    config: dict[str, Any]
    critic_folder: Path

    def __post_init__(self) -> None:
        loaded = load_config(values=self.config)
        self.policy = load_policy(loaded)
        self.sampler = LocalSampler(self.policy)
        self.params = SamplingParams(TASKS[self.task].longest)
        self.critic = load_value_model(str(self.critic_folder), Path(), self.policy)
        held_out = encode(self.policy, load_source(loaded).test, loaded.config)
        self.verdict = self.judged_by()
        self.problems = held_out[
            self.seed * PROBLEMS : (self.seed + 1) * PROBLEMS
        ]  # other ones for each seed

    def score(self, *asked: Any, rewards: Rewards | None = None) -> list[Group]:
        """Sample and judge."""
        return score_all(*asked, scorer=Scorer(rewards or self.verdict), progress=lambda *_: None)

    def judged_by(self, *others: Any) -> Rewards:
        """The verdict, and others."""
        found = load_rewards([VERDICT, *others], Path())
        found.decode = self.policy.decode
        return found

    def groups(self, what: str, size: int, *others: Any) -> list[Group]:
        """A group of each problem; the same draws for the same ``what``."""
        requests = [Request(p.tokens, self.streams(p, what, size)) for p in self.problems]
        return self.score(self.problems, requests, self.sampler, self.params, rewards=self.judged_by(*others))

    def streams(self, problem: Prompted, what: str, size: int) -> list[int]:
        """Keys of random draws."""
        return [key(self.seed, "credit", what, problem.problem.id, n) for n in range(size)]

    def continued(self, groups: Sequence[Group], what: str, settings: Row) -> list[Group]:
        """With the values after each segment, by draws of their own."""

        def stream(cut: Cut, number: int) -> int:
            return key(self.seed, what, groups[cut.group].problem.id, cut.sample, cut.end, number)

        drawn = (self.sampler, self.params, self.policy.decode, stream, self.score)
        return with_segments(groups, settings, *drawn)

    def going_on(
        self, groups: Sequence[Group], begun: Mapping[tuple[int, bytes], Completion], length: int
    ) -> list[Group]:
        """Of each beginning of so many tokens the continuations that are the truth, judged as wholes."""
        asked, requests, wholes = [], [], {}
        for (number, start), whole in begun.items():
            group = groups[number]
            prompt = np.concatenate([group.prompt, whole.tokens[:length]])
            streams = [key(self.seed, "truth", group.problem.id, start.hex(), n) for n in range(2 * HALF)]
            asked.append(Prompted(group.problem, prompt))
            requests.append(Request(prompt, streams))
            wholes[streams[0]] = (whole, length - 1)
        left = SamplingParams(self.params.max_tokens - length)
        return self.score(asked, requests, Continued(self.sampler, wholes, self.policy.decode), left)

    def values(self, group: Group) -> np.ndarray:
        """(G, T): the critic's, before each token."""
        packed = pack([group.prompt], [[c.tokens for c in group.completions]])
        with torch.no_grad():
            return packed.unpack(self.critic.score(packed).values).double().numpy()


def prepared(task: str, seed: int) -> Model:
    """A cold start, and a critic that has watched it: the policy waits until the last batch is drawn."""
    longest = TASKS[task].longest
    data = write_rows(FOLDER / task, TASKS[task].make)
    files = {part: str(data / f"{part}.jsonl") for part in ("train", "test")}
    model = {"model": str(cold_start(data, longest, seed, SHARE)), "data": files, "rewards": [VERDICT]}
    base, folder = merged(settings_of(longest, seed), model), data / f"critic-{seed}"
    if not (folder / "result.json").exists():
        watching = {
            "algorithm": {**ppo("own", 1e-3, warmup=CRITIC_STEPS - 1), "kl": None},
            "rollout": {"group_size": 4, "prompts_per_step": 16},
            "train": {**RL["train"], "steps": CRITIC_STEPS},
            "eval": {"every": 0, "problems": 8},
        }  # fmt: skip
        quiet(covey.train, **merged(base, watching), output=str(folder))
    return Model(task, seed, base, folder / "final" / "critic")


def lengths_of(group: Group) -> list[int]:
    """Tokens of each completion."""
    return [len(c.tokens) for c in group.completions]


def mask_of(group: Group) -> torch.Tensor:
    """(G, T) bool."""
    lengths = torch.tensor(lengths_of(group))
    return torch.arange(int(lengths.max())) < lengths[:, None]


def tokens_of(group: Group) -> torch.Tensor:
    """(G, T) int64, -1 after a completion's end."""
    rows = [torch.from_numpy(c.tokens) for c in group.completions]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)


@dataclass(frozen=True)
class Guess:
    """An estimator's credit for all groups."""

    rows: Sequence[np.ndarray]
    """Of each group (G, T)."""
    adds_up: bool
    """Gains of tokens, of which a step's is the sum. False: what a segment or completion gained, said of each
    of its tokens."""
    tokens: float = 0.0
    """Generated for it, a completion."""
    learned: float = 0.0
    """Tokens that a critic has learned from, once."""
    in_units: bool = True
    """Of the reward; z-scores are not."""


def oracles(model: Model, groups: Sequence[Group]) -> tuple[Guess, Guess]:
    """By how much each token moved the chance of success, by one half of the continuations and by the other.

    Siblings that begin alike share the continuations of what they share.
    """
    worth: dict[tuple[int, bytes], np.ndarray] = {}
    spent = 0
    for length in range(max(max(lengths_of(g)) for g in groups)):
        begun = {
            (n, c.tokens[:length].tobytes()): c
            for n, g in enumerate(groups)
            for c in g.completions
            if len(c.tokens) > length
        }
        for place, group in zip(begun, model.going_on(groups, begun, length), strict=True):
            worth[place] = group.rewards.reshape(2, HALF).mean(1)
            spent += sum(len(c.tokens) - length for c in group.completions)
    half = spent / (2 * len(groups) * GROUP)
    first, second = ([true_gains(g, n, worth, h) for n, g in enumerate(groups)] for h in (0, 1))
    return Guess(first, True, half), Guess(second, True, half)


def true_gains(
    group: Group, number: int, worth: Mapping[tuple[int, bytes], np.ndarray], half: int
) -> np.ndarray:
    """(G, T): the differences between what the beginnings are worth; the whole is judged for certain."""
    found = np.zeros((len(group.completions), max(lengths_of(group))))
    for row, reward, c in zip(found, group.rewards, group.completions, strict=True):
        before = [worth[number, c.tokens[:n].tobytes()][half] for n in range(len(c.tokens))]
        row[: len(c.tokens)] = np.diff([*before, reward])
    return found


def guesses(model: Model, groups: Sequence[Group]) -> dict[str, Guess]:
    """The credit that covey's estimators give."""
    rewards, masks = [torch.from_numpy(g.rewards) for g in groups], [mask_of(g) for g in groups]
    every = list(zip(rewards, masks, groups, strict=True))
    found = {
        "GRPO": Guess([(group_centered(r)[:, None] * m).numpy() for r, m, _ in every], False),
        f"prefix tree, {GROUP} siblings": Guess(
            [prefix_tree(r, tokens_of(g), m).numpy() for r, m, g in every], True
        ),
    }
    found["prefix tree, as many tokens as by lines"], lines = more_siblings(model, groups)
    for name, cut in VINE.items():
        after = lines if name == "lines" else model.continued(groups, f"vine {name}", cut)
        own = [segment_difference(r, g.segments, m) for (r, m, _), g in zip(every, after, strict=True)]
        cost = sum(g.continued for g in after) / (len(groups) * GROUP)
        label = f"continuations, {name}, {cut['continuations']} each"
        found[label] = Guess([a.numpy() for a in own], name == "tokens", cost)
    watched = tokens_trained(model.critic_folder.parents[1], 4)
    for lam, name in ((1.0, "critic, lambda 1"), (0.0, "critic, lambda 0")):
        found[name] = Guess([critics(model, g, m, lam) for _, m, g in every], lam == 0.0, learned=watched)
    found["process rewards"] = Guess([processed(g, m) for _, m, g in every], False, in_units=False)
    return found


def more_siblings(model: Model, groups: Sequence[Group]) -> tuple[Guess, list[Group]]:
    """The prefix tree of larger groups that cost as much as continuations by lines, which come with it."""
    lines = model.continued(groups, "vine lines", VINE["lines"])
    own = sum(sum(lengths_of(g)) for g in groups)
    size = GROUP + round(GROUP * sum(g.continued for g in lines) / own)
    larger = model.groups("group", size)
    rows = []
    for few, many in zip(groups, larger, strict=True):
        credit = prefix_tree(torch.from_numpy(many.rewards), tokens_of(many), mask_of(many))
        rows.append(credit[:GROUP, : max(lengths_of(few))].numpy())
    cost = (sum(sum(lengths_of(g)) for g in larger) - own) / (len(groups) * GROUP)
    return Guess(rows, True, cost), lines


def critics(model: Model, group: Group, mask: torch.Tensor, lam: float) -> np.ndarray:
    """(G, T): what generalised advantage estimation makes of the critic's values."""
    paid = torch.zeros(mask.shape, dtype=torch.float64)
    for row, reward, length in zip(paid, group.rewards, lengths_of(group), strict=True):
        row[length - 1] = float(reward)
    return gae(paid, torch.from_numpy(model.values(group)), mask, lam=lam).numpy()


def processed(group: Group, mask: torch.Tensor) -> np.ndarray:
    """(G, T): the verifier of steps, by step."""
    steps = group.steps["partial_sums"]
    values = torch.from_numpy(group.components["partial_sums"])[None]
    one = torch.ones(1, dtype=torch.float64)
    return process_zscore(values, one, mask, [steps], credit="own_step").numpy()


def by_completion(rows: Sequence[np.ndarray], groups: Sequence[Group]) -> list[np.ndarray]:
    """Each completion's tokens, without padding."""
    pairs = zip(rows, groups, strict=True)
    return [own[:n] for found, g in pairs for own, n in zip(found, lengths_of(g), strict=True)]


def in_steps(tokens: np.ndarray, ends: Sequence[int], adds_up: bool) -> np.ndarray:
    """A completion's credit by token -> by step: the sum of gains, or the mean of what is said of each token.

    >>> in_steps(np.array([0.5, 0.1, -0.2]), [1, 2], adds_up=True).tolist()
    [0.6, -0.2]
    """
    parts = np.split(tokens, [end + 1 for end in ends[:-1]])
    return np.array([p.sum() if adds_up else p.mean() for p in parts])


def fidelity(truth: Sequence[np.ndarray], guess: Sequence[np.ndarray], seed: int) -> dict[str, float]:
    """Correlations with the truth and squared error over all tokens, or steps, of all completions.

    ``within``: completion by completion, each less its mean, which is all that finer credit adds.
    ``shuffled``: the control, the same numbers in other orders in each completion, the mean of many orders.
    """
    rng, flat = np.random.default_rng(seed), np.concatenate(truth)
    mixed = [np.concatenate([rng.permutation(own) for own in guess]) for _ in range(ORDERS)]

    def centred(rows: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([own - own.mean() for own in rows])

    return {
        "correlation": correlation(flat, np.concatenate(guess)),
        "within": correlation(centred(truth), centred(guess)),
        "shuffled": float(np.mean([correlation(flat, own) for own in mixed])),
        "shuffled_error": float(np.mean([np.square(flat - own).mean() for own in mixed])),
        "error": error(truth, guess),
    }


def correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Pearson's; not a number where one of them does not vary."""
    if min(np.ptp(first), np.ptp(second)) < 1e-9:
        return math.nan
    return float(np.corrcoef(first, second)[0, 1])


def steps_of(
    rows: Sequence[np.ndarray], ends: Sequence[Sequence[int]], adds_up: bool = True
) -> list[np.ndarray]:
    """``in_steps`` of every completion."""
    return [in_steps(own, at, adds_up) for own, at in zip(rows, ends, strict=True)]


def cell(task: str, seed: int) -> dict[str, Any]:
    """Of one model: unit -> estimator -> its fidelity."""
    file = FOLDER / task / f"cell-{seed}.json"
    if file.exists():
        return json.loads(file.read_text())
    model = prepared(task, seed)
    verifier = {partial_sums: {"modulus": TASKS[task].modulus, "weight": 0.0}}
    groups = model.groups("group", GROUP, verifier)
    oracle, other = oracles(model, groups)
    first, second = by_completion(oracle.rows, groups), by_completion(other.rows, groups)
    truth = [(a + b) / 2 for a, b in zip(first, second, strict=True)]
    ends = [step_ends(model, c) for g in groups for c in g.completions]
    found: dict[str, Any] = {
        "right": float(np.mean([g.pass_rate for g in groups])),
        "length": float(np.mean([n for g in groups for n in lengths_of(g)])),
        "tokens": {"nothing": {"error": error(truth)}},
        "steps": {"nothing": {"error": error(steps_of(truth, ends))}},
    }
    for name, guess in guesses(model, groups).items():
        rows = by_completion(guess.rows, groups)
        known = {"cost": guess.tokens, "in_units": guess.in_units, "learned": guess.learned}
        found["tokens"][name] = fidelity(truth, rows, seed) | known
        found["steps"][name] = (
            fidelity(steps_of(truth, ends), steps_of(rows, ends, guess.adds_up), seed) | known
        )
    name, known = f"oracle, {HALF} each, against another", {"cost": oracle.tokens}
    found["tokens"][name] = fidelity(first, second, seed) | known
    found["steps"][name] = fidelity(steps_of(first, ends), steps_of(second, ends), seed) | known
    file.write_text(json.dumps(found))
    return found


def error(truth: Sequence[np.ndarray], guess: Sequence[np.ndarray] | None = None) -> float:
    """Mean square of what is left of the truth; without a guess, of the truth."""
    flat = np.concatenate(truth)
    return float(np.square(flat if guess is None else flat - np.concatenate(guess)).mean())


def step_ends(model: Model, completion: Completion) -> list[int]:
    """The last token of each line of a completion."""
    decode, longest = model.policy.decode, model.params.max_tokens
    return [*cut_places(completion, "lines", 1000, longest, decode), len(completion.tokens) - 1]


def by_seed(values: Sequence[float]) -> Estimate:
    """The mean over seeds with Student's interval: a seed has a model and problems of its own."""
    known = np.array([v for v in values if not math.isnan(v)])
    if len(known) < 2:
        return Estimate(float(known.mean()) if len(known) else math.nan, -math.inf, math.inf, share=False)
    half = STUDENT[len(known) - 2] * float(known.std(ddof=1)) / math.sqrt(len(known))
    return Estimate(float(known.mean()), float(known.mean()) - half, float(known.mean()) + half, share=False)


def shown(values: Sequence[float], form: str = ".2f", low: float = -1.0, high: float = 1.0) -> str:
    """A mean and its interval, within what is possible."""
    own = by_seed(values)
    if math.isnan(own.value):
        return "-"
    return f"{own.value:{form}} [{max(own.low, low):{form}}, {min(own.high, high):{form}}]"


def table(cells: Sequence[Row], unit: str) -> str:
    """Markdown: an estimator a row."""
    heads = ("estimator", "correlation", "within completions", "shuffled", "squared error, x 1000", "tokens")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name in cells[0][unit]:
        own = [c[unit][name] for c in cells]
        known = "correlation" in own[0]
        row = [shown([o.get(k, math.nan) for o in own]) for k in ("correlation", "within", "shuffled")]
        row.append(
            shown([1000 * o["error"] for o in own], ".0f", 0.0, math.inf)
            if own[0].get("in_units", True)
            else "-"
        )
        row.append(f"{np.mean([o['cost'] for o in own]):,.0f}" if known else "0")
        if own[0].get("learned"):
            row[-1] = f"0, {np.mean([o['learned'] for o in own]):,.0f} once"
        lines.append(f"| {' | '.join([name, *row])} |")
    return "\n".join(lines)


def ceiling(cells: Sequence[Row], unit: str) -> float:
    """How far the truth as it was sampled correlates with itself without noise (Spearman and Brown)."""
    halves = [
        max(own["correlation"], 0.0) for c in cells for name, own in c[unit].items() if "oracle" in name
    ]
    return float(np.mean([math.sqrt(2 * r / (1 + r)) for r in halves]))


def report(found: Mapping[str, Sequence[Row]], learned: Mapping[str, Sequence[Row]]) -> str:
    """The page of results."""
    cells = next(iter(found.values()))
    about = (
        f"{len(cells)} seeds, each with its own model (a Qwen3 of width 64 with 2 layers, supervised until "
        f"{SHARE:.0%} of its sampled answers are right) and {PROBLEMS} held-out problems, {GROUP} "
        f"completions each. What a token gained is the mean reward of {2 * HALF} continuations from behind "
        "it, less that from before it; the reward is 1 for a correct answer, else 0. A step is a line: what "
        "it gained is the sum over its tokens. All intervals are Student's over the seeds, 95 %."
    )
    columns = (
        "Correlation: over all tokens, or steps. Within completions: each completion's mean subtracted from "
        "estimate and truth, which leaves what is finer than the completion. Shuffled: the control, the "
        f"correlation of the same estimates in other orders in each completion, {ORDERS} of them. Squared "
        "error: of estimates in units of the reward, which z-scores are not; a quarter of the last row's is "
        "the noise of the truth, and in every other row too. Tokens: generated for the estimate, for each "
        "completion, besides the group; a critic's are those it has learned from."
    )
    parts = ["# Credit by token against the truth", machine("credit"), about, columns]
    for task, own in found.items():
        right = ", ".join(f"{100 * c['right']:.0f}" for c in own)
        length = np.mean([c["length"] for c in own])
        parts.append(f"## {task}\n\nRight, by seed: {right} %; {length:.0f} tokens a completion.")
        for unit in ("tokens", "steps"):
            most = (
                f"Because of the noise of the truth no estimate can reach more than {ceiling(own, unit):.2f}."
            )
            parts += [f"### By {unit[:-1]}", table(own, unit), most]
    if learned:
        about = (
            f"{next(iter(found))}, the same models: {RL['train']['steps']} steps of 64 completions, Dr. GRPO "
            "with another advantage, lr 2e-4, KL 0.05. Held-out accuracy on 200 problems, two samples each; "
            "intervals over seeds and problems, differences paired by both."
        )
        parts += ["## Training with it", about, trained_table(learned)]
    return "\n\n".join(parts) + "\n"


def shuffled_tree(rewards: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The control in training: the prefix tree's credit, in each completion on other tokens. -> (G, T)."""
    credit = prefix_tree(rewards, tokens, mask).numpy()
    rng = np.random.default_rng(int(tokens.sum()))
    for row, own in zip(credit, mask.numpy(), strict=True):
        row[own] = rng.permutation(row[own])
    return torch.from_numpy(credit)


TRAINED: Mapping[str, tuple[Any, str]] = {
    "outcome": ("group_centered", "one advantage a completion (Dr. GRPO)"),
    "prefix tree": ("prefix_tree", "the same with the tree's credit"),
    "prefix tree, shuffled": (shuffled_tree, "the control: its credit on other tokens of the completion"),
    "oracle": (
        {"name": "segment_difference", "split_by": "lines", "most": 6, "continuations": 16},
        "by lines, 16 continuations each, whose tokens are not counted",
    ),
}
"""Arm -> its advantage, and what it is; all else is the same."""


def trained(task: str, arm: str, seed: int) -> dict[str, Any]:
    """Held-out accuracy before and after training with an arm's credit."""
    folder = FOLDER / task / f"trained-{list(TRAINED).index(arm)}-{seed}"
    data, longest = folder.parent, TASKS[task].longest
    if not (folder / "result.json").exists():
        own = {
            "model": str(cold_start(data, longest, seed, SHARE)),
            "data": {part: str(data / f"{part}.jsonl") for part in ("train", "test")},
            "rewards": [VERDICT],
            "algorithm": {"name": "dr_grpo", "advantage": TRAINED[arm][0], "kl": {"coef": 0.05}},
            "rollout": RL["rollout"],
            "train": {**RL["train"], "lr": 2e-4},
            "eval": {"every": RL["train"]["steps"], "problems": 200, "samples": 2},
        }
        quiet(covey.train, **merged(settings_of(longest, seed), own), output=str(folder))
    first, *_, last = (Evaluation.from_record(r).pass_rate for r in records(folder, "evals"))
    return {"before": first, "after": last, "tokens": tokens_trained(folder, 8)}


def trained_table(found: Mapping[str, Sequence[Row]]) -> str:
    """Markdown: an arm a row, less the outcome's."""
    lines = ["| credit | sampled, % | points, less outcome | tokens | what it is |", "|---" * 5 + "|"]
    before = np.stack([run["before"] for run in found["outcome"]])
    lines.append(f"| cold start | {str(over_seeds(before)).replace(' % ', ' ')} | | | |")
    for name, runs in found.items():
        after = np.stack([run["after"] for run in runs])
        less = after - np.stack([run["after"] for run in found["outcome"]])
        gain = "" if name == "outcome" else points(over_seeds(less, -1.0)).replace(" points", "")
        tokens = f"{np.mean([run['tokens'] for run in runs]):,.0f}"
        share = str(over_seeds(after)).replace(" % ", " ")
        lines.append(f"| {name} | {share} | {gain} | {tokens} | {TRAINED[name][1]} |")
    return "\n".join(lines)


def main() -> None:
    """Measure what is left, print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--train", action="store_true", help="train with some of them, too")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/credit.md")
    given = parser.parse_args()
    found: dict[str, list[Row]] = {}
    for task, seed in product(given.tasks, given.seeds):
        own = cell(task, seed)
        found.setdefault(task, []).append(own)
        print(task, seed, f"{own['right']:.2f}", f"{own['length']:.1f}", flush=True)
    learned: dict[str, list[Row]] = {}
    for arm, seed in product(TRAINED, given.seeds if given.train else ()):
        run = trained(given.tasks[0], arm, seed)
        learned.setdefault(arm, []).append(run)
        print(arm, seed, f"{run['before'].mean():.2f} {run['after'].mean():.2f}", flush=True)
    page = report(found, learned)
    print(page)
    if given.write:
        (RESULTS / "credit.md").write_text(page)


if __name__ == "__main__":
    main()
