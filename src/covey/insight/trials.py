"""`covey diagnose`: the changes of a run that are worth a trial, and what each of them did.

A trial continues the run from one of its steps under one change. It draws what the run would have drawn, so
trials from the same step differ in the change alone, and are compared problem by problem.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from covey.insight.conclusion import points
from covey.insight.difference import by_problem
from covey.insight.findings.finding import STREAM, Finding
from covey.insight.findings.remedies import (
    FEWER_UPDATES,
    TENTH_OF_LR,
    ChangeTo,
    ScaleBy,
    larger_alpha,
    weaker_pull,
)
from covey.insight.findings.rule import Remedy
from covey.insight.findings.settings import SettingOf, yaml_line
from covey.insight.findings.table import RULES
from covey.insight.findings.view import WIDEST, RunView
from covey.runs.estimates import Z95, Estimate, Evaluation, gain, gains, why_incomparable
from covey.runs.folder import RESULT, read_numbers, read_stream
from covey.runs.reader import read_ending
from covey.runs.rollouts import recorded_steps
from covey.system.plot import align_columns

UNCHANGED = "unchanged"
HARDLY_MOVED = 0.01
"""Nats a completion from the first policy, up to which a policy has hardly moved."""


def much_larger_lr(factor: float) -> Remedy:
    """Return a probe that multiplies the learning rate of a policy that has hardly moved."""
    scaled = ScaleBy("train.lr", factor, 1e-5, bound=0.1)
    return lambda run: scaled(run) if abs(run.late("kl/start")) < HARDLY_MOVED else None


OUT_OF_RANGE: tuple[Remedy, ...] = (
    ChangeTo("algorithm.entropy.coef", 0.001, lambda coef: not coef or coef <= 0.01),
    weaker_pull,
    larger_alpha,
    ChangeTo(
        "rollout.temperature", 1.0, lambda value: isinstance(value, int | float) and 0.7 <= value <= 1.2
    ),
    *FEWER_UPDATES,
)
"""Settings that metrics do not tell apart, tried where they are far from those in use."""
LEARNING_RATES: tuple[Remedy, ...] = (
    TENTH_OF_LR,
    ScaleBy("train.lr", 3, 1e-5),
    much_larger_lr(30),
    much_larger_lr(1000),
)
"""Other learning rates, which are tried in any case."""
MAX_CHANGES = 8
"""Largest number of changes that are tried, unless the user names them."""
RANGE = "out of range"
"""The reason for a trial of a setting that is far from usual values."""
RATE = "rate"
"""The reason for a trial of another learning rate."""
CHANCE = "chance"
"""The reason for a trial with another order of the data: it shows what chance alone changes."""
FALSE_ALARM = 0.05
"""Chance that any of the changes seems to do something, if none of them does."""
SAMPLING = ("rollout.temperature", "rollout.top_p", "rollout.top_k")
"""Settings that change what is sampled from the same weights."""
NOT_KNOWN = Estimate(math.nan, -math.inf, math.inf)
WIDEST_CHANGE = 48
"""Characters of a change in the table."""


class Change(NamedTuple):
    """A change of the config that is worth a trial."""

    line: str
    """The changed line of the config: `train.lr: 1e-06`."""
    why: str
    """The finding whose remedy it is, `out of range`, `rate`, or `chance`."""

    @property
    def option(self) -> str:
        """The change as an option of the command line."""
        key, _, value = self.line.partition(": ")
        return f"--{key}={value}"

    @property
    def key(self) -> str:
        """The setting that it changes."""
        return self.line.partition(": ")[0]


def changes_worth_trying(
    stage: Path, findings: Sequence[Finding], setting: SettingOf, seed: int
) -> list[Change]:
    """Return at most ``MAX_CHANGES`` changes: remedies of the findings, settings out of range, learning
    rates, and another order of the data.
    """
    metrics = read_numbers(stage, "metrics.jsonl")
    evals = [Evaluation.from_record(record) for record in read_stream(stage, "evals.jsonl")]
    view = RunView(metrics, evals, setting, patient=False)
    rules = {rule.name: rule for rule in RULES}
    explained = [finding.id for finding in findings if finding.id in rules]
    candidates = [(name, remedy(view)) for name in explained for remedy in rules[name].remedies]
    candidates += [(RANGE, probe(view)) for probe in OUT_OF_RANGE]
    candidates += [(RATE, probe(view)) for probe in LEARNING_RATES]
    # A line that several reasons suggest is tried once, for the first of them.
    reasons = dict[str, str]()
    for reason, line in candidates:
        if line is not None:
            reasons.setdefault(line, reason)
    changes = [Change(line, reason) for line, reason in reasons.items()]
    other_order = Change(yaml_line("seed", seed + 1), CHANCE)
    return [*changes[: MAX_CHANGES - 1], other_order]


@dataclass(frozen=True)
class TrialResult:
    """Results of the steps under one change, compared with the same steps without it."""

    change: Change
    folder: Path
    held_out: Estimate
    """Held-out accuracy at the end, minus the unchanged trial's; NaN if they cannot be compared."""
    training: Estimate
    """Accuracy of the completions of the later half of the steps, minus the unchanged trial's."""
    findings: tuple[str, ...]
    """Findings of the trial itself."""
    ended: str
    """The reason why it ended before its last step; empty if it did not."""

    @property
    def effect(self) -> str:
        """`helps`, `harms` or `no clear change`: beyond what chance explains in that many trials."""
        estimates = [e for e in (self.held_out, self.training) if not math.isnan(e.value)]
        if any(e.high < 0 for e in estimates):
            return "harms"
        return "helps" if any(e.low > 0 for e in estimates) else "no clear change"


def trials_of(folders: Mapping[Change, Path], unchanged: Path, start: int, steps: int) -> list[TrialResult]:
    """Return what each trial did; all began after ``start`` steps and were to do ``steps`` more."""
    # Two comparisons of each trial with the unchanged one: the chance of an error is divided among them.
    errors = NormalDist().inv_cdf(1 - FALSE_ALARM / 2 / max(1, 2 * len(folders)))
    late = start + steps // 2
    before = _accuracy(unchanged, late)
    return [
        TrialResult(
            change,
            folder,
            _held_out(unchanged, folder, change, errors),
            _training_gain(before, _accuracy(folder, late), change, errors),
            findings_since(folder, start),
            ending_of(folder),
        )
        for change, folder in folders.items()
    ]


def compare_trial(change: Change, before: Path, after: Path, start: int, end: int) -> TrialResult:
    """Return what a change did: the run ``after`` it against the one ``before``, in the same steps.

    These are the steps after ``late_half``, up to ``end``. Held-out accuracy is
    compared where both runs measured it after the same number of steps.
    """
    late = late_half(start, end)
    evals_before = {record["step"]: record for record in read_stream(before, "evals.jsonl")}
    evals_after = {record["step"]: record for record in read_stream(after, "evals.jsonl")}
    common = [step for step in evals_before if step in evals_after and int(str(step)) > start]
    held_out = NOT_KNOWN
    if common:
        first = Evaluation.from_record(evals_before[common[-1]])
        second = Evaluation.from_record(evals_after[common[-1]])
        held_out = _gain_held_out(first, second, change, Z95)
    training = _training_gain(_accuracy(before, late, end), _accuracy(after, late, end), change, Z95)
    return TrialResult(change, after, held_out, training, findings_since(after, start), "")


def late_half(start: int, end: int) -> int:
    """Return the step after which two runs are compared: half-way to ``end``, at most WIDEST before it."""
    return max(start + (end - start) // 2, end - WIDEST)


def findings_since(folder: Path, start: int) -> tuple[str, ...]:
    """Return the ids of the findings that a trial made itself."""
    records = read_stream(folder, STREAM)
    return tuple(str(r["id"]) for r in records if isinstance(r["step"], int) and r["step"] > start)


def ending_of(folder: Path) -> str:
    """Return why a trial ended early, in its first sentence; empty if it did not."""
    if (folder / RESULT).exists():
        return ""
    return read_ending(folder).partition(". ")[0] or "not finished"


def _held_out(unchanged: Path, changed: Path, change: Change, errors: float) -> Estimate:
    """Return the gain of held-out accuracy, greedy if the change is one of sampling itself."""
    have_ended = all((folder / RESULT).exists() for folder in (unchanged, changed))
    before = _last_evaluation(unchanged)
    after = _last_evaluation(changed)
    if not have_ended or before is None or after is None:
        return NOT_KNOWN
    return _gain_held_out(before, after, change, errors)


def _gain_held_out(before: Evaluation, after: Evaluation, change: Change, errors: float) -> Estimate:
    if why_incomparable(before, after):
        return NOT_KNOWN
    return gains(before, after, errors)["greedy" if change.key in SAMPLING else "sampled"]


def _last_evaluation(folder: Path) -> Evaluation | None:
    records = read_stream(folder, "evals.jsonl")
    return Evaluation.from_record(records[-1]) if records else None


class _Accuracy(NamedTuple):
    """Accuracy by problem, the least number of completions of a problem, and the verdict."""

    of_problem: Mapping[str, float]
    completions: int
    verdict: str
    """The reward that says what is correct; empty if nothing was evaluated."""


def _accuracy(folder: Path, late: int, end: float = math.inf) -> _Accuracy:
    """Return the accuracy of a trial's completions after step ``late`` and up to ``end``, by problem."""
    evaluation = _last_evaluation(folder)
    verdict = evaluation.verdict if evaluation is not None else ""
    steps = [step for step in recorded_steps(folder) if late < step <= end]
    values = by_problem(folder, steps, lambda row: row["components"].get(verdict, row["reward"]))
    rates = {problem: float(np.mean(np.array(scores) > 0.5)) for problem, scores in values.items()}
    fewest = min((len(scores) for scores in values.values()), default=1)
    return _Accuracy(rates, fewest, verdict)


def _training_gain(before: _Accuracy, after: _Accuracy, change: Change, errors: float) -> Estimate:
    """Return the gain of accuracy on the problems that both trials met; unknown if its meaning changed."""
    common = sorted(before.of_problem.keys() & after.of_problem.keys())
    # Without a verdict by name, `correct` is what the changed rewards pay.
    means_another = change.key in SAMPLING or (change.key == "rewards" and not before.verdict)
    if not common or means_another or before.verdict != after.verdict:
        return NOT_KNOWN
    old = np.array([before.of_problem[problem] for problem in common])
    new = np.array([after.of_problem[problem] for problem in common])
    doubt = 1 / math.sqrt(min(before.completions, after.completions))
    return gain(old, new, doubt, standard_errors=errors)


def helpful_trials(trials: Sequence[TrialResult]) -> list[TrialResult]:
    """Return the trials that clearly help, the likeliest cause first. Chance is no remedy.

    Many things help a sick run, another learning rate above all. So a change that the findings or the config
    point to comes first if it does at least half as much as the best.
    """
    good = [t for t in trials if t.effect == "helps" and t.change.why != CHANCE]
    largest_gain = max(map(_gain, good), default=0.0)
    return sorted(good, key=lambda t: (_gain(t) < largest_gain / 2, t.change.why == RATE, -_gain(t)))


def _gain(trial: TrialResult) -> float:
    return _size(trial.training) + _size(trial.held_out)


def _size(estimate: Estimate) -> float:
    return 0.0 if math.isnan(estimate.value) else estimate.value


def lines_of_trials(trials: Sequence[TrialResult], unchanged: Sequence[str]) -> Iterator[str]:
    """Yield a table of the trials and a conclusion; ``unchanged``: findings of the unchanged trial."""
    head = ["change", "why", "held-out", "training", "findings", ""]
    rows = [("unchanged", "", "", "", ", ".join(unchanged) or "none", "")]
    for t in sorted(trials, key=_gain, reverse=True):
        numbers = (points(t.held_out), points(t.training))
        line = t.change.line
        if len(line) > WIDEST_CHANGE:
            line = f"{line[: WIDEST_CHANGE - 3]}..."
        ids = ", ".join(t.findings) or "none"
        rows.append((line, t.change.why, *numbers, ids, t.ended or t.effect))
    yield from align_columns([head, *rows])
    yield ""
    yield conclusion(trials, unchanged)


def conclusion(trials: Sequence[TrialResult], unchanged: Sequence[str]) -> str:
    """Return what the trials say: what makes more answers correct, and what ends the first finding."""
    good = helpful_trials(trials)
    sentences = []
    if good:
        best, *others = good
        sentences.append(f"{best.change.line} helps: {describe_trial(best)}")
        if others:
            sentences.append(f"{', '.join(t.change.line for t in others)} helps too")
    ends = _ends(unchanged[0], trials) if unchanged else ""
    if ends:
        sentences.append(ends)
    if not sentences:
        return "no change does more than chance explains; try more steps (--steps), or your own"
    return ". ".join(sentences)


def _ends(finding: str, trials: Sequence[TrialResult]) -> str:
    """Return under which changes a finding does not occur, in a sentence; empty if there is none."""
    without = [t for t in trials if finding not in t.findings and t.effect != "harms" and not t.ended]
    if any(t.change.why == CHANCE for t in without):
        return f"{finding} comes and goes by chance"
    lines = ", ".join(t.change.line for t in without)
    return f"{finding} does not occur under {lines}" if lines else ""


def describe_trial(trial: TrialResult) -> str:
    """Return the gains of a trial that are known, in words."""
    gains = [("held-out problems", trial.held_out), ("training problems", trial.training)]
    return ", ".join(f"{points(e)} on {where}" for where, e in gains if not math.isnan(e.value))


def record_of_trials(trials: Sequence[TrialResult], unchanged: Sequence[str]) -> Mapping[str, object]:
    """Return the trials as JSON."""
    return {
        "helping": [t.change.line for t in helpful_trials(trials)],
        "conclusion": conclusion(trials, unchanged),
        "findings_of_unchanged": list(unchanged),
        "trials": [
            {
                "change": t.change.line,
                "why": t.change.why,
                "effect": t.effect,
                "held_out": vars(t.held_out),
                "training": vars(t.training),
                "findings": list(t.findings),
                "ended": t.ended,
                "folder": str(t.folder),
            }
            for t in trials
        ],
    }
