"""How a run, or a stage of it, has ended: its record, and what is said of it besides the verdict."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from covey.estimates import wilson
from covey.insight.evidence import Records
from covey.insight.usage import shell_word
from covey.insight.verdict import Verdict
from covey.models.reward_model import is_reward_model
from covey.prompts import Prompted
from covey.runs.best import Best
from covey.runs.folder import RESULT
from covey.system.integrity import read_record
from covey.tasks.source import EXAMPLES
from covey_verify.types import Messages

ACCURACY = re.compile("held_out/.+/accuracy")


@dataclass(frozen=True)
class Result:
    """How a run, or a stage of it, ended."""

    folder: Path
    """`final/` in it is the model, or `examples.jsonl` what a stage that makes examples has made."""
    steps: int
    seconds: float
    example: str | Messages
    """A prompt to try the model with, and in ``template`` what its chat template gets besides."""
    verdict: Verdict | None = None
    """None where there were no held-out problems."""
    template: Mapping[str, object] = field(default_factory=dict)

    @property
    def made(self) -> Path:
        """The model's folder, or the file of examples."""
        return self.folder / (EXAMPLES if (self.folder / EXAMPLES).is_file() else "final")

    @property
    def kind(self) -> str:
        """What that is: `examples`, a `reward model` or a `model`."""
        if self.made.name == EXAMPLES:
            return "examples"
        return "reward model" if is_reward_model(self.made) else "model"

    def record(self) -> dict[str, object]:
        """As JSON."""
        return {**asdict(self), "folder": str(self.folder)}


def read_result(output: Path) -> Result:
    """The record of a run that has ended. Raises CheckpointError where it is damaged."""
    return read_record(
        output / RESULT, Result, "Put it back, or remove it to continue from the last checkpoint"
    )


def offer(best: Best | None, output: Path) -> str:
    """Of a run whose best evaluated step is better than its last one: which, and how to have its model."""
    if best is None or not best.fell:
        return ""
    chance = "" if best.clear else ", which may be chance"
    return f"best evaluation was {best}{chance}: covey export {shell_word(str(output))} --step {best.step}"


def told_of_better(best: Best, step: int, chosen: bool) -> str:
    """What a verdict says of a better step before its last, ``step``; ``chosen``: `final/` is that one."""
    if chosen and best.step != step:
        return f"; final/ is step {best.step}, the best of {best.count} evaluations, so partly by chance"
    sampled = best.evaluation.summary()["pass@1"]
    return f"; step {best.step} was better, {sampled} sampled" if best.clear else ""


def ranked(metrics: Records, held_out: Sequence[Prompted]) -> str:
    """What the held-out examples said last, in words; nothing where there are none."""
    seen = [m for m in metrics if any(k.startswith("held_out/") for k in m)]
    if not held_out or not seen:
        return ""
    shares = [v for k, v in seen[-1].items() if ACCURACY.fullmatch(k) and isinstance(v, float)]
    asked = sum(1 if a.said is None else int(a.trained.sum()) for p in held_out for a in p.answers)
    paired = len(held_out[0].answers) == 2
    count = len(held_out) if paired else asked
    said = "answers" if asked == len(held_out) else "steps"
    what = "pairs with the chosen above the rejected" if paired else f"{said} judged as they are labelled"
    return f"Of {count} held-out {what}: {wilson(round(shares[0] * count), count)}"
