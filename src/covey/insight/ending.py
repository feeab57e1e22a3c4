"""The end of a run or stage: its record, and the sentences that are added to the verdict."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from covey.insight.evidence import Records
from covey.insight.usage import shell_word
from covey.insight.verdict import Verdict
from covey.models.reward_model import is_reward_model
from covey.runs.best import Best
from covey.runs.estimates import wilson
from covey.runs.folder import CURVE, RESULT
from covey.sampling.prompts import Prompted
from covey.system.integrity import read_record
from covey.system.notebook import result_html
from covey.tasks.source import EXAMPLES
from covey_verify.types import Messages

ACCURACY = re.compile("held_out/.+/accuracy")


@dataclass(frozen=True)
class Result:
    """The record of how a run, or a stage of it, ended."""

    folder: Path
    """Folder of the stage: `final/` in it is the model, or `examples.jsonl` the examples it made."""
    steps: int
    seconds: float
    example: str | Messages
    """A prompt to try the model with; ``template`` has further arguments of its chat template."""
    verdict: Verdict | None = None
    """The verdict; None if there were no held-out problems."""
    template: Mapping[str, object] = field(default_factory=dict)

    @property
    def made(self) -> Path:
        """The model's folder, or the file of examples."""
        return self.folder / (EXAMPLES if (self.folder / EXAMPLES).is_file() else "final")

    @property
    def kind(self) -> str:
        """The kind of ``made``: `examples`, a `reward model` or a `model`."""
        if self.made.name == EXAMPLES:
            return "examples"
        return "reward model" if is_reward_model(self.made) else "model"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the verdict, the model's folder and the curve."""
        verdict = self.verdict.sentence if self.verdict else f"{self.steps} steps"
        return result_html(
            [f"{self.folder.name}: {verdict}", f"{self.kind}: {self.made}"], self.folder / CURVE
        )

    def record(self) -> dict[str, object]:
        """Return the result as JSON."""
        return {**asdict(self), "folder": str(self.folder)}


def read_result(output: Path) -> Result:
    """Return the record of a run that has ended. Raises CheckpointError if it is damaged."""
    return read_record(
        output / RESULT, Result, "Put it back, or remove it to continue from the last checkpoint"
    )


def offer(best: Best | None, output: Path) -> str:
    """Name the best evaluated step, if it beats the last one, and the command that exports its model."""
    if best is None or not best.fell:
        return ""
    chance = "" if best.clear else ", which may be chance"
    return f"best evaluation was {best}{chance}: covey export {shell_word(str(output))} --step {best.step}"


def told_of_better(best: Best, step: int, chosen: bool) -> str:
    """Return the part of a verdict about a better step before the last, ``step``.

    ``chosen``: `final/` is the best step.
    """
    if chosen and best.step != step:
        return f"; final/ is step {best.step}, the best of {best.count} evaluations, so partly by chance"
    sampled = best.evaluation.summary()["pass@1"]
    return f"; step {best.step} was better, {sampled} sampled" if best.clear else ""


def ranked(metrics: Records, held_out: Sequence[Prompted]) -> str:
    """Describe the last result on held-out examples; empty if there are none."""
    results = [m for m in metrics if any(name.startswith("held_out/") for name in m)]
    if not held_out or not results:
        return ""
    # One such metric per method of preference training.
    rates = [v for name, v in results[-1].items() if ACCURACY.fullmatch(name) and isinstance(v, float)]
    count = len(held_out)
    description = "pairs with the chosen above the rejected"
    if len(held_out[0].answers) != 2:
        # An answer is one question; an answer with labels by step is one question per labelled step.
        count = sum(1 if a.said is None else int(a.trained.sum()) for p in held_out for a in p.answers)
        description = f"{'answers' if count == len(held_out) else 'steps'} judged as they are labelled"
    return f"Of {count} held-out {description}: {wilson(round(rates[0] * count), count)}"
