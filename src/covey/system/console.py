"""The console: show a run as a live panel on a terminal or in a notebook, as occasional lines elsewhere."""

from __future__ import annotations

import errno
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from covey.system.notebook import NotebookPanel
from covey.system.plot import Curve, braille, draw_curves
from covey.system.text import duration, escape_controls

LINES_PER_STAGE = 20
CURVE_ROWS = 5
SHORT_CURVE = 32
"""Columns of the curve on a low or narrow terminal, where it has one line."""
ANNOUNCE_SECONDS = 0.8
"""Seconds after which new work, or an evaluation, is announced where there is no terminal."""
MAX_SILENCE = 10.0
"""Longest silence in seconds there, during the first minute of a console."""
FIRST_MINUTE = 60.0
"""Seconds of that first minute, and the longest silence after it."""
REFRESHES_PER_SECOND = 8
"""Times a second that a panel is drawn anew."""
MIN_TALL_LINES = 18
"""Lines of a terminal that has room for curves and completions."""
MIN_WIDE_COLUMNS = 60
"""Columns of such a terminal."""


class Output:
    """A text stream that drops what it cannot write (closed pipe, full disk) and keeps the reason.

    A character that the stream's encoding lacks is written as an escape.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.lost: OSError | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write the text, or drop it."""
        with self._tolerating():
            try:
                self.stream.write(text)
            except UnicodeEncodeError as error:
                self.stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        return len(text)

    def flush(self) -> None:
        """Flush the stream, or do nothing if it is gone."""
        with self._tolerating():
            self.stream.flush()

    @contextmanager
    def _tolerating(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.lost = self.lost or error
        except ValueError:
            # ValueError is how Python reports a write to a closed stream; any other one is a bug.
            if not self.stream.closed:
                raise
            self.lost = self.lost or OSError(errno.EBADF, os.strerror(errno.EBADF))


@contextmanager
def tolerant_output() -> Iterator[None]:
    """Inside the block no `print` fails because its pipe was closed or its disk is full."""
    before = sys.stdout, sys.stderr
    # A process may start with closed standard streams; Python then has None for them.
    sys.stdout, sys.stderr = (cast("TextIO", s and tolerant(s)) for s in before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        sys.stdout, sys.stderr = before


def tolerant(stream: TextIO) -> Output:
    """Return the stream as an Output, which it may be already."""
    return stream if isinstance(stream, Output) else Output(stream)


def say_aside(text: str) -> None:
    """Print a line on standard error, for people; standard output has the result only."""
    print(escape_controls(text), file=sys.stderr)


class PanelCompletion(NamedTuple):
    """A completion for the panel, with its reward."""

    reward: float
    text: str


class RunConsole:
    """The console of one run. With ``quiet`` it prints nothing."""

    def __init__(self, quiet: bool = False) -> None:
        self.output = tolerant(sys.stdout) if sys.stdout is not None else None
        self.console = Console(highlight=False, quiet=quiet, file=cast("TextIO | None", self.output))
        self._loss_reported = False
        self.live: Live | NotebookPanel | None = None
        self._reset("", 0, 0)
        self.created = self.last_line = self.work_began = time.monotonic()
        self.announced: set[str] = set()
        """Kinds of work that have been announced where there is no terminal."""
        self.left: Callable[[], float | None] = self._left_at_this_pace
        self._ended: threading.Event | None = None
        self._print_lock = threading.Lock()

    def _reset(self, title: str, steps: int, first: int) -> None:
        """Forget the stage before: nothing of this one is known yet."""
        self.title = title
        self.steps = steps
        self.first = self.step_number = first
        self.started = time.monotonic()
        self.may_end_early = self.by_completion = False
        self.values: list[tuple[float, float]] = []
        self.held_out: list[tuple[float, float]] = []
        self.facts: Mapping[str, str] = {}
        self.unhealthy: Mapping[str, str] = {}
        self.examples: tuple[str, PanelCompletion, PanelCompletion] | None = None
        self.newest = self.work = self.count = self.estimate = ""

    def say(self, text: str, style: str = "") -> None:
        """Print a line that stays: wrapped between words on a terminal or notebook, left whole in a file.

        The newest line in yellow, a warning or finding, is on the panel too.
        """
        if style == "yellow":
            self.newest = text
        self.last_line = time.monotonic()
        wrapped = self.console.is_terminal or self.console.is_jupyter
        self.console.print(Text(escape_controls(text), style=style), soft_wrap=not wrapped)

    def lost_output(self) -> str:
        """Return why output is lost, on the first call only; empty if nothing is lost."""
        if self._loss_reported or self.output is None or self.output.lost is None:
            return ""
        self._loss_reported = True
        return str(self.output.lost.strerror)

    def begin(
        self,
        title: str,
        steps: int,
        first: int = 0,
        may_end_early: bool = False,
        by_completion: bool = False,
        left: Callable[[], float | None] | None = None,
    ) -> None:
        """Start to show a stage, from step ``first`` if it resumes.

        ``may_end_early``: before all its steps. ``by_completion``: its progress counts completions.
        ``left`` estimates the seconds left, if it can; the default estimates them from the steps so far.
        """
        self._reset(title, steps, first)
        self.left = left or self._left_at_this_pace
        self.may_end_early = may_end_early
        self.by_completion = by_completion
        if self.console.quiet:
            return
        if self.console.is_terminal:
            self.live = Live(
                console=self.console,
                get_renderable=self.panel,
                refresh_per_second=REFRESHES_PER_SECOND,
                transient=True,
            )
            self.live.start()
        elif self.console.is_jupyter:
            self.live = NotebookPanel(self.panel, self.console.width)
            self.live.start()
        else:
            # Beside the main thread, which may be busy for minutes.
            self._ended = threading.Event()
            threading.Thread(
                target=self._keep_printing_activity, args=(self._ended,), name="console", daemon=True
            ).start()

    def recall(self, metrics: Sequence[Mapping[str, float]], evals: Sequence[Mapping[str, float]]) -> None:
        """Restore the curves from the records before the stage was interrupted."""
        for name in ("reward/mean", "loss"):
            curve = [(m["step"], m[name]) for m in metrics if m.get(name) is not None]
            # The reward if there is one, else the loss.
            self.values = self.values or curve
        self.held_out = [(e["step"], e["pass@1"]) for e in evals if e.get("pass@1") is not None]

    def show_sampling(self, count: int, total: int, what: str = "sampling") -> None:
        """Show how many completions are done."""
        if self.by_completion:
            self.step_number = count
        if not count:
            self.work = ""  # the same work may begin again
        self.show_work(what, f" {count}/{total}", self.estimate if count else "")

    def tokens(self, sampled: int, most_to_come: int) -> None:
        """Estimate the time left of the present sampling from the ``sampled`` tokens and the most to come."""
        elapsed = time.monotonic() - self.work_began
        if sampled and elapsed > ANNOUNCE_SECONDS:
            self.show_work(
                self.work, self.count, f", at most {duration(elapsed / sampled * most_to_come)} left"
            )

    def loading(self, what: str) -> None:
        """Announce work that reports nothing until it ends and may take minutes."""
        self.announced.add(what)
        self.last_line = time.monotonic()
        self.show_work(what)
        if self.live is None and not self.console.is_terminal:
            self.say(f"{what} ...")

    def fewer_running(self, running: int) -> None:
        """Report that sampling ran out of memory and continues with fewer completions at once."""
        self.say(f"out of memory while sampling; continuing with {running} completions at once", "yellow")

    def show_work(self, work: str, count: str = "", estimate: str = "") -> None:
        """Show the present work, how far it is, and when it ends; without a terminal now and then."""
        if work != self.work:
            self.work_began = time.monotonic()
            self.announced -= {"evaluating"}
        self.work = work
        self.count = count
        self.estimate = estimate
        self._print_activity()

    def _print_activity(self) -> None:
        """Print the present work if it is new, or after some silence; only without a terminal."""
        with self._print_lock:
            moment = time.monotonic()
            silence = MAX_SILENCE if moment - self.created < FIRST_MINUTE else FIRST_MINUTE
            new = self.work not in self.announced and moment - self.work_began > ANNOUNCE_SECONDS
            if self.live is None and self.work and (new or moment - self.last_line > silence):
                self.announced.add(self.work)
                self.say(f"{self.title} {self.activity}".strip())

    def _keep_printing_activity(self, over: threading.Event) -> None:
        while not over.wait(ANNOUNCE_SECONDS / 2):
            self._print_activity()

    @property
    def activity(self) -> str:
        """The present work, how far it is, and when it ends."""
        return f"{self.work}{self.count}{self.estimate}"

    def answer(self, text: str) -> None:
        """Print an answer to a signal: above the panel, else on standard error."""
        if self.live is not None:
            self.say(text, "bold")
        else:
            # A terminal has written ^C at the beginning of the line.
            say_aside(f"\n{text}" if sys.stderr.isatty() else text)

    def add_accuracy(self, step: int, accuracy: float) -> None:
        """Add a point to the curve of held-out accuracy, sampled."""
        self.held_out.append((float(step), accuracy))

    def step(
        self, number: int, value: float, facts: Mapping[str, str], unhealthy: Mapping[str, str] | None = None
    ) -> None:
        """Show a finished step: its headline value (reward or loss), facts, and styles for worrying ones.

        A step without a score has the value NaN, which is no point of the curve.
        """
        self.values += [] if math.isnan(value) else [(float(number), value)]
        self.step_number = number
        self.facts = facts
        self.unhealthy = unhealthy or {}
        self.work = self.count = self.estimate = ""
        every = max(1, self.steps // LINES_PER_STAGE)
        if self.live is None and (number % every == 0 or number == self.steps):
            shown = "  ".join(f"{k} {v}" for k, v in facts.items())
            self.say(f"{self.title} {number}/{self.steps}  {shown}  {self._time_left()}")

    def end(self) -> None:
        """End the display of a stage."""
        if self.live is not None:
            self.live.stop()
            self.live = None
        if self._ended is not None:
            self._ended.set()
            self._ended = None

    def _left_at_this_pace(self) -> float | None:
        steps = self.step_number - self.first
        elapsed = time.monotonic() - self.started
        return elapsed / steps * (self.steps - self.step_number) if steps else None

    def _time_left(self) -> str:
        seconds = self.left()
        if not seconds:
            return ""
        return f"at most {duration(seconds)} left" if self.may_end_early else f"{duration(seconds)} left"

    def panel(self) -> RenderableType:
        """Return the panel: progress, curves, facts of the last step, two completions, the newest finding.

        On a low or narrow terminal the curve has one line, and the completions are left out.
        """
        width = self.console.width
        tall = self.console.height >= MIN_TALL_LINES and width >= MIN_WIDE_COLUMNS
        # Items of a row stand side by side where there is room.
        rows: list[list[Text]] = [self._progress(width)]
        activity = [Text(self.activity, style="dim")]
        if self.values and tall:
            rows += [[line] for line in self._curves(width)]
        elif self.values:
            activity.insert(0, self._short_curve(min(SHORT_CURVE, width)))
        rows.append(activity)
        rows.append([self._fact(name, value) for name, value in self.facts.items()])
        if tall:
            rows += [[line] for line in self._completions(width)]
        if self.newest:
            newest = Text.assemble(("! ", "yellow"), escape_controls(self.newest).replace("\n", " "))
            newest.truncate(2 * width, overflow="ellipsis")
            rows.append([newest])
        return Group(*(line for row in rows for line in flow([item for item in row if item], width)))

    def _progress(self, width: int) -> list[Text]:
        """Return the items of the first line: title, bar, steps and time left."""
        unit = "completion" if self.by_completion else "step"
        words = [Text(w) for w in (f"{unit} {self.step_number}/{self.steps}", self._time_left()) if w]
        # Everything must fit: the title is truncated first, then the bar gets the rest.
        room = width - sum(2 + w.cell_len for w in words)
        title = Text(self.title, style="bold")
        title.truncate(max(16, room), overflow="ellipsis")
        room -= title.cell_len + 2
        bar = [_bar(self.step_number / max(self.steps, 1), min(30, room))] if room >= 8 else []
        return [title, *bar, *words]

    def _fact(self, name: str, value: str) -> Text:
        style = self.unhealthy.get(name)
        return Text.assemble((f"{name} ", "dim"), (value, style) if style else value)

    def _short_curve(self, width: int) -> Text:
        (line,) = braille(self._own_curve(), width, 1, max(self.steps, 1))
        return Text(line, style="green")

    def _own_curve(self) -> Curve:
        # The headline of a step, reward or loss, is the first of its facts.
        return Curve(next(iter(self.facts), "reward"), self.values, "green")

    def _curves(self, width: int) -> list[Text]:
        curves = [self._own_curve()]
        if self.held_out:
            curves.append(Curve("held-out accuracy", self.held_out, "cyan", (0.0, 1.0)))
        widest = MIN_WIDE_COLUMNS if len(curves) == 1 else width
        return draw_curves(curves, min(width, widest), CURVE_ROWS, max(self.steps, 1))

    def _completions(self, width: int) -> list[Text]:
        """Return the prompt, and the best and the worst completion of a group, one line each."""
        if self.examples is None:
            return []
        prompt, best, worst = self.examples
        lines = [Text(_one_line(prompt), style="dim")]
        for sign, style, shown in (("▲", "green", best), ("▼", "red", worst)):
            lines.append(Text.assemble((f"{sign} {shown.reward:.3g} ", style), _one_line(shown.text)))
        for line in lines:
            line.truncate(width, overflow="ellipsis")
        return lines


def _one_line(text: str) -> str:
    return escape_controls(text.strip()).replace("\n", " ⏎ ").replace("\t", " ")


def flow(items: Sequence[Text], width: int) -> list[Text]:
    """Lay items out side by side on as many lines as they need; only one wider than a line is broken.

    >>> [line.plain for line in flow([Text("loss 1.5"), Text("tokens/s 9"), Text("lr 3")], 20)]
    ['loss 1.5  tokens/s 9', 'lr 3']
    """
    lines: list[Text] = []
    for item in items:
        if lines and lines[-1].cell_len + 2 + item.cell_len <= width:
            lines[-1] = Text.assemble(lines[-1], "  ", item)
        else:
            lines.append(item)
    return lines


def _bar(share: float, width: int) -> Text:
    filled = round(min(share, 1.0) * width)
    return Text.assemble(("━" * filled, "green"), ("━" * (width - filled), "bright_black"))
