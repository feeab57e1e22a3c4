"""The live panel: whole at every width, and what it says is so."""

from __future__ import annotations

import hashlib
import io
import math
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console
from tests.training.runs import FAST, varied

from covey.config.load import load_config
from covey.system.console import Output, PanelCompletion, RunConsole
from covey.system.signals import StopSignal
from covey.training.pipeline import run_pipeline

FACTS = {
    "reward": "-10.123",
    "correct": "100 %",
    "dead groups": "100 %",
    "truncated": "100 %",
    "entropy": "12.34",
    "tokens/s": "123,456",
}


def test_a_stream_takes_what_it_can_and_never_stops_a_run() -> None:
    raw = io.BytesIO()
    output = Output(io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    output.write("größe")
    assert raw.getvalue() == rb"gr\xf6\xdfe"
    assert output.lost is None
    raw.close()
    output.write("more")
    assert isinstance(output.lost, OSError)


def terminal(width: int, height: int = 12) -> Console:
    return Console(width=width, height=height, force_terminal=True, file=io.StringIO(), highlight=False)


def shown(console: RunConsole, width: int, height: int = 12) -> list[str]:
    console.console = terminal(width, height)
    rendered = console.console.render_lines(console.panel(), pad=False)
    return ["".join(part.text for part in line) for line in rendered]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
@pytest.mark.parametrize("title", ["2-rl (rl)", "gsm8k-qwen2.5-0.5b-instruct-dapo-lr3e-6-seed0 (rl)"])
def test_no_word_of_the_panel_is_cut(width: int, title: str) -> None:
    console = RunConsole(quiet=True)
    console.begin(title, 20_000, may_end_early=True)
    console.started -= 500_000.0
    for number in range(12_340, 12_345):
        console.step(number, number % 3, FACTS)
    console.show_sampling(1024, 20_480, "evaluating")
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


@pytest.mark.parametrize("width", [80, 120])
def test_where_there_is_room_the_panel_shows_curves_completions_and_the_newest_finding(width: int) -> None:
    console = RunConsole(quiet=True)
    console.begin("2-rl (rl)", 10)
    for number in range(1, 6):
        console.step(number, number / 5, FACTS, {"truncated": "red"})
    console.add_accuracy(5, 0.25)
    long = "an answer that is much longer than a line of the terminal " * 9
    console.examples = ("1+\x1b[2J2=", PanelCompletion(1.0, f"3\n{long}"), PanelCompletion(0.0, long))
    console.say(f"step 4: something. {long}", "yellow")
    lines = shown(console, width, 30)
    assert max(map(len, lines)) <= width
    assert len(lines) <= 16
    text = "\n".join(lines)
    for whole in (
        "reward  0.2 -> 1",
        "held-out accuracy  0.25",
        "1+\\x1b[2J2=",
        "▲ 1 3 ⏎ an",
        "▼ 0 an",
        "! step 4",
    ):
        assert whole in text, whole
    curve = next(line for line in lines if line.startswith("1 ┤"))
    assert curve.index("┤", 3) == lines[lines.index(curve) + 1].index("┤", 3), "the second curve is upright"
    assert any(0x2800 < ord(c) < 0x2900 for c in text)


def test_a_low_terminal_shows_the_same_curve_in_one_line() -> None:
    console = RunConsole(quiet=True)
    console.begin("2-rl (rl)", 10)
    for number in range(1, 11):
        console.step(number, math.nan if number == 5 else number / 10, FACTS)
    low, tall = (shown(console, 80, height) for height in (12, 30))
    lines = [sum(any(0x2800 < ord(c) < 0x2900 for c in line) for line in page) for page in (low, tall)]
    assert lines[0] == 1 < lines[1]
    assert not any("nan" in line for line in (*low, *tall))


def test_a_resumed_stage_shows_its_past() -> None:
    console = RunConsole(quiet=True)
    console.begin("rl", 10, first=2)
    console.recall(
        [{"step": 1, "reward/mean": 0.5}, {"step": 2, "reward/mean": 0.75}], [{"step": 0, "pass@1": 0.1}]
    )
    assert console.values == [(1, 0.5), (2, 0.75)]
    assert console.held_out == [(0, 0.1)]


def test_a_long_line_breaks_between_words_and_stays_whole_in_a_file() -> None:
    line = "estimated memory: 468 of 25,277 MB (program 383, weights 3, gradient 3, optimizer 7, update 53)"
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

    def show_work(self, work: str, count: str = "", estimate: str = "") -> None:
        self.told.append(work.partition(" ")[0])
        super().show_work(work, count, estimate)

    def step(self, *arguments) -> None:
        self.told.append(f"step, {self._time_left() and ''}{'at most' if self.may_end_early else 'exactly'}")
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
    end = ["saving", "evaluating", "writing"]
    assert words == ["loading", "checking", "evaluating", *step, "saving", *step, *end]
    step = ["updating", "step, at most", ""]
    words = told(
        tmp_path / "sft", method="sft", train={**train, "stop_at": 1.0}, eval={**FAST["eval"], "every": 1}
    )
    assert words == [
        "loading",
        "checking",
        "evaluating",
        *step,
        "evaluating",
        *end,
    ]  # every answer is right for `varied`: it stops


def spoken(monkeypatch, *acts: tuple[float, str]) -> list[str]:
    """The lines of a console in a pipe whose activities begin at these seconds."""
    clock = [0.0]
    monkeypatch.setattr("covey.system.console.time.monotonic", lambda: clock[0])
    console, stream = RunConsole(), io.StringIO()
    console.console = Console(file=stream, highlight=False)
    console.begin("run (rl)", 100)
    console.end()  # and with it the thread that looks after the clock
    for at, activity in acts:
        clock[0] = at
        done, _, total = activity.partition("/")
        if total and int(done):
            console.tokens(sampled=10, most_to_come=30)
        console.show_sampling(int(done), int(total)) if total else console.show_work(activity)
    return stream.getvalue().splitlines()


def test_a_pipe_hears_now_and_then_what_is_being_done(monkeypatch) -> None:
    """There was no line for minutes, and nobody said beforehand that the settings take hours."""
    assert spoken(monkeypatch, (1, "saving"), (2, "updating"), (9, "saving")) == []
    assert spoken(monkeypatch, (1, "a"), (11, "b"), (12, "c"), (22, "d")) == ["run (rl) b", "run (rl) d"]
    late = [(float(second), "updating") for second in range(100, 400, 5)]
    assert len(spoken(monkeypatch, *late)) == 5, "one a minute"
    begun = spoken(monkeypatch, (0, "0/128"), (12, "16/128"))
    assert begun == ["run (rl) sampling 0/128, at most 36 s left"]


def test_what_loads_for_long_is_said_before_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    RunConsole().loading("loading the model x")
    assert capsys.readouterr().out == "loading the model x ...\n"
    RunConsole(quiet=True).loading("loading the model x")
    assert capsys.readouterr().out == ""


def test_a_signal_is_answered_while_the_main_thread_computes_in_c() -> None:
    """The answer waited for the end of a matrix product, or of a GPU's whole micro-batch."""
    answers: list[tuple[str, bool]] = []
    busy = True
    with StopSignal().listening(lambda again: answers.append((again, busy))) as stop:
        threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGTERM)).start()
        while not answers:
            # Python runs no handler before this returns.
            hashlib.pbkdf2_hmac("sha256", b"word", b"salt", 1_000_000)
            busy = False
    assert stop.reason == "stopped by SIGTERM"
    assert answers == [("a second SIGTERM", True)]


def test_a_forked_child_hears_no_signal_of_the_run_and_ends_by_its_own() -> None:
    answers: list[str] = []
    reader, writer = os.pipe()
    with StopSignal().listening(answers.append) as stop:
        child = os.fork()
        if child == 0:
            os.write(writer, b"born")
            time.sleep(60)
            os._exit(0)
        os.read(reader, 4)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert stop.reason is None and not answers


def test_an_answer_goes_to_standard_error_and_not_into_a_result(capfd: pytest.CaptureFixture[str]) -> None:
    RunConsole(quiet=True).answer("stopping now")
    assert capfd.readouterr() == ("", "stopping now\n")
