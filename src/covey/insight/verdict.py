"""The verdict on a run: learned, did not learn, or cannot tell, with the evidence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from covey.console import duration
from covey.evaluation import Evaluation, gain

Word = Literal["learned", "did not learn", "got worse", "cannot tell"]
SMALLEST_GAIN = 0.05
"""An interval narrower than this on both sides of zero is evidence of no learning."""


@dataclass(frozen=True)
class Verdict:
    """What held-out problems say about a run."""

    word: Word
    sentence: str


def judge(before: Evaluation, after: Evaluation, seconds: float) -> Verdict:
    """Compare greedy accuracy on the same held-out problems, problem by problem."""
    change = gain(before.greedy, after.greedy)
    if change.low > 0:
        word: Word = "learned"
    elif change.high < 0:
        word = "got worse"
    elif max(abs(change.low), abs(change.high)) < SMALLEST_GAIN:
        word = "did not learn"
    else:
        word = "cannot tell"
    old, new = before.summary(), after.summary()
    sentence = (
        f"{word}: {100 * old['greedy'].value:.0f} % -> {new['greedy']} greedy, "
        f"{100 * old['pass@1'].value:.0f} % -> {new['pass@1']} sampled, "
        f"on {len(after.greedy)} held-out problems in {duration(seconds)}"
    )
    if word == "cannot tell":
        sentence += f"; the change, {100 * change.value:+.0f} points [{100 * change.low:+.0f}, "
        sentence += f"{100 * change.high:+.0f}], may be chance: evaluate on more problems or train longer"
    return Verdict(word, sentence)
