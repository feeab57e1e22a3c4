"""The end of a run: its record, its learning curve, its stages, and what is added to the conclusion."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from covey.insight.chart import Line, Panel, chart
from covey.insight.conclusion import Conclusion, points
from covey.insight.evidence import Records
from covey.models.reward_model import is_reward_model
from covey.runs.atomic import write_file
from covey.runs.best import BestEvaluation
from covey.runs.estimates import Evaluation, gains, wilson
from covey.runs.folder import CURVE, RESULT, read_stream
from covey.sampling.prompts import EncodedProblem
from covey.system.integrity import read_sealed
from covey.system.notebook import result_html
from covey.system.opening import count_lines
from covey.system.plot import align_columns
from covey.system.text import percent, shell_word
from covey.tasks.source import EXAMPLES_FILE, prompt_key
from covey_verify.types import Messages

ACCURACY = re.compile("held_out/.+/accuracy")
SMOOTHING = 10
"""Number of steps that one point of the training curve averages."""
STAGE_HEAD = ("stage", "steps", "greedy", "sampled", "gain of the stage", "tokens", "besides")
MEASURES: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "held_out/preference/accuracy": ("held-out pairs ranked", percent),
    "held_out/reward_model/accuracy": ("held-out ranked", percent),
    "text/reflection": ("reflection", "{:.2f}".format),
}
"""Metrics of the last step that accuracy does not show: their words, and how their value is written."""


@dataclass(frozen=True)
class Result:
    """The record of how a run, or a stage of it, ended."""

    folder: Path
    """Folder of the stage. Its `final/` is the model, or its `examples.jsonl` the examples."""
    steps: int
    seconds: float
    example: str | Messages
    """A prompt to try the model with; ``template`` has further arguments for the chat template."""
    conclusion: Conclusion | None = None
    """The run's conclusion; None if there were no held-out problems."""
    template: Mapping[str, object] = field(default_factory=dict)

    @property
    def product(self) -> Path:
        """The model's folder, or the file of examples."""
        return self.folder / (EXAMPLES_FILE if (self.folder / EXAMPLES_FILE).is_file() else "final")

    @property
    def kind(self) -> str:
        """The kind of ``product``: `examples`, `reward model` or `model`."""
        if self.product.name == EXAMPLES_FILE:
            return "examples"
        return "reward model" if is_reward_model(self.product) else "model"

    @property
    def failed(self) -> bool:
        """Whether held-out problems say that the run has not helped; exit code 1 of a command."""
        return self.conclusion is not None and self.conclusion.failed

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the conclusion, the model's folder and the curve."""
        conclusion = self.conclusion.sentence if self.conclusion else f"{self.steps} steps"
        return result_html(
            [f"{self.folder.name}: {conclusion}", f"{self.kind}: {self.product}"], self.folder / CURVE
        )

    def record(self) -> dict[str, object]:
        """Return the result as JSON, under the names that ``read_result`` reads."""
        return {**asdict(self), "folder": str(self.folder)}


def read_result(output: Path) -> Result:
    """Return the record of a run that has ended. Raises CheckpointError if it is damaged."""
    return read_sealed(
        output / RESULT, Result, "Put it back, or remove it to continue from the last checkpoint"
    )


def better_step_hint(best: BestEvaluation | None, output: Path) -> str:
    """Name the best evaluated step, if it beats the last one, and the command that exports its model."""
    if best is None or not best.is_worse_now:
        return ""
    chance = "" if best.is_significant else ", which may be chance"
    return f"best evaluation was {best}{chance}: covey export {shell_word(str(output))} --step {best.step}"


def better_step_clause(best: BestEvaluation, step: int, chosen: bool) -> str:
    """Return the part of a conclusion about a step that was better than the last one, ``step``.

    ``chosen``: `final/` is the best step.
    """
    if chosen and best.step != step:
        return f"; final/ is step {best.step}, the best of {best.count} evaluations, so partly by chance"
    sampled = best.evaluation.summary()["pass@1"]
    return f"; step {best.step} was better, {sampled} sampled" if best.is_significant else ""


def held_out_ranking(metrics: Records, held_out: Sequence[EncodedProblem], steps: int) -> str:
    """Describe the result on held-out examples after ``steps`` steps; empty if there is none.

    Results for one prompt depend on one another: the interval counts them as one if they may all be equal.
    """
    results = [m for m in metrics if m["step"] <= steps and any(n.startswith("held_out/") for n in m)]
    if not held_out or not results:
        return ""
    # One such metric per method of preference training.
    rates = [v for name, v in results[-1].items() if ACCURACY.fullmatch(name) and isinstance(v, float)]
    by_prompt = Counter[str]()
    for prompted in held_out:
        by_prompt[prompt_key(prompted.problem)] += _questions(prompted)
    count = by_prompt.total()
    description = "pairs with the chosen above the rejected"
    if len(held_out[0].answers) != 2:
        description = f"{'answers' if count == len(held_out) else 'steps'} judged as they are labelled"
    # Kish's effective number of trials, for results that are equal within a prompt.
    trials = count**2 / sum(n**2 for n in by_prompt.values())
    prompts = "" if len(by_prompt) == count else f" (of {len(by_prompt)} prompts)"
    return f"Of {count} held-out {description}{prompts}: {wilson(rates[0] * trials, trials)}"


def _questions(prompted: EncodedProblem) -> int:
    """Return the number of results of an example: 1, or one for each labelled step of its answer."""
    labelled = (a for a in prompted.answers if a.judgements is not None)
    return sum(int(a.trained.sum()) for a in labelled) or 1


# --- the learning curve -----------------------------------------------------------------------------


def write_curve(path: Path, title: str, metrics: Records, evals: Records) -> None:
    """Draw a run's `metrics.jsonl` and `evals.jsonl` records."""
    accuracy = [
        _held_out(evals, "greedy", "held-out, greedy", 100),
        _held_out(evals, "pass@1", "held-out, sampled", 100),
        _training_line(metrics, "accuracy", 100),
    ]
    reward = [_held_out(evals, "reward", "held-out, sampled"), _training_line(metrics, "reward/mean")]
    panels = [Panel("Accuracy", accuracy, unit=" %", bounds=(0, 100)), Panel("Reward", reward)]
    write_file(path, chart(panels, title, title=title))


def _training_line(metrics: Records, name: str, scale: float = 1.0) -> Line:
    points = [(m["step"], scale * m[name]) for m in metrics if m.get(name) is not None]
    windows = [points[i : i + SMOOTHING] for i in range(0, len(points), SMOOTHING)]
    means = [np.mean(window, axis=0).tolist() for window in windows]
    return Line("training, sampled", [x for x, _ in means], [y for _, y in means], background=True)


def _held_out(evals: Records, name: str, label: str, scale: float = 1.0) -> Line:
    """Return an estimate over the steps at which it was evaluated; None in a record means unknown."""

    def values(key: str) -> list[float]:
        return [math.nan if e.get(key) is None else scale * e[key] for e in evals]

    steps = [e["step"] for e in evals]
    return Line(label, steps, values(name), values(f"{name}/low"), values(f"{name}/high"))


# --- the stages of a pipeline -------------------------------------------------------------------------


def stage_table(folders: Sequence[Path]) -> list[str]:
    """Return lines for people: each stage, its final held-out accuracy and its gain."""
    return align_columns([STAGE_HEAD, *(_stage_row(folder) for folder in folders)])


def _stage_row(folder: Path) -> tuple[str, ...]:
    metrics = read_stream(folder, "metrics.jsonl")
    evals = [Evaluation.from_record(record) for record in read_stream(folder, "evals.jsonl")]
    accuracy = ("", "", "")
    if len(evals) > 1:
        end = evals[-1].summary()
        accuracy = (str(end["greedy"]), str(end["pass@1"]), points(gains(evals[0], evals[-1])["sampled"]))
    last: Mapping[str, Any] = metrics[-1] if metrics else {}
    length = last.get("length/mean", math.nan)
    tokens = "" if length is None or math.isnan(length) else f"{length:.0f}"
    return (folder.name, str(len(metrics)), *accuracy, tokens, ", ".join(_remarks(folder, last)))


def _remarks(folder: Path, last: Mapping[str, Any]) -> Iterator[str]:
    """Yield what accuracy does not show of a stage, from the metrics of its ``last`` step."""
    if (folder / EXAMPLES_FILE).is_file():
        yield f"{count_lines(folder, EXAMPLES_FILE)} examples"
    for name, (words, form) in MEASURES.items():
        if last.get(name):
            yield f"{words} {form(last[name])}"
    for name, value in last.items():
        # The mean of each reward function; the mean of their sum is reward/mean.
        if name.startswith("reward/") and name.endswith("/mean") and name.count("/") == 2:
            yield f"{name.split('/')[1]} {value:.2f}"
