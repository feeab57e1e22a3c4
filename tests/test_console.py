"""The live panel: whole at every width, and what it says is so."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from covey.config.load import load_config
from covey.console import RunConsole
from covey.signals import StopSignal
from covey.training.pipeline import run_pipeline
from tests.train.test_runs import FAST, varied

FACTS = {
    "reward": "-10.123",
    "correct": "100 %",
    "dead groups": "100 %",
    "truncated": "100 %",
    "entropy": "12.34",
    "tokens/s": "123,456",
}


def terminal(width: int) -> Console:
    return Console(width=width, height=24, force_terminal=True, file=io.StringIO(), highlight=False)


def shown(console: RunConsole, width: int) -> list[str]:
    console.console = terminal(width)
    rendered = console.console.render_lines(console.panel(), pad=False)
    return ["".join(part.text for part in line) for line in rendered]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
@pytest.mark.parametrize("title", ["2-rl (rl)", "gsm8k-qwen2.5-0.5b-instruct-dapo-lr3e-6-seed0 (rl)"])
def test_no_word_of_the_panel_is_cut(width: int, title: str) -> None:
    console = RunConsole(quiet=True)
    console.begin(title, 20_000, at_most=True)
    console.started -= 500_000.0
    for number in range(12_340, 12_345):
        console.step(number, number % 3, FACTS)
    console.sampling(1024, 20_480, "evaluating")
    lines = shown(console, width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for whole in (
        "step 12344/20000",
        "evaluating 1024/20480",
        " left",
        *(f"{k} {v}" for k, v in FACTS.items()),
    ):
        assert whole in text, whole
    assert len(lines) <= (4 if width >= 80 else 8)


def test_a_long_line_breaks_between_words_and_stays_whole_in_a_file() -> None:
    line = "memory: about 468 MB of 25,277 (program 383, weights 3, gradient 3, optimizer 7, update 53)"
    for console, lines in ((terminal(80), 2), (Console(width=80, file=io.StringIO()), 1)):
        page = RunConsole(quiet=True)
        page.console = console
        page.say(line)
        printed = console.file.getvalue().splitlines()
        assert len(printed) == lines
        assert " ".join(x.strip() for x in printed) == line


class Watched(RunConsole):
    """Remembers what it was told."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.told: list[str] = []

    def doing(self, activity: str) -> None:
        self.told.append(activity.partition(" ")[0])
        super().doing(activity)

    def step(self, *arguments) -> None:
        self.told.append(f"step, {self._time_left() and ''}{'at most' if self.at_most else 'exactly'}")
        super().step(*arguments)
        self.told.append(self.activity)


def told(output: Path, **settings) -> list[str]:
    console = Watched()
    values = {**FAST, "rewards": (varied,), "output": output, **settings}
    run_pipeline(load_config(values=values), console, StopSignal())
    return [word for i, word in enumerate(console.told) if i == 0 or word != console.told[i - 1]]


def test_the_panel_says_what_happens_now(tmp_path: Path) -> None:
    train = {"steps": 2, "save_every": 1}
    words = told(tmp_path / "rl", train=train)
    step = ["sampling", "updating", "step, exactly", ""]
    assert words == ["evaluating", *step, "saving", *step, "saving", "evaluating"]
    step = ["updating", "step, at most", ""]
    words = told(
        tmp_path / "sft", method="sft", train={**train, "stop_at": 1.0}, eval={**FAST["eval"], "every": 1}
    )
    assert words == [
        "evaluating",
        *step,
        "evaluating",
        "saving",
        "evaluating",
    ]  # every answer is right for `varied`: it stops
