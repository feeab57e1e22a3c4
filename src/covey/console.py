"""The console: a live panel on a terminal, one line now and then elsewhere, nothing with --json."""

from __future__ import annotations

import errno
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

BARS = "▁▂▃▄▅▆▇█"
LINES_PER_STAGE = 20


OUTPUT_GONE = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF, errno.ENXIO, errno.ESTALE)


class Output:
    """A text stream whose reader or disk may go: what cannot be written is dropped, and the reason kept."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.lost: OSError | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write, or forget."""
        with self._tolerating():
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, or forget."""
        with self._tolerating():
            self.stream.flush()

    @contextmanager
    def _tolerating(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in OUTPUT_GONE:
                raise
            self.lost = self.lost or error


@contextmanager
def tolerant_output() -> Iterator[None]:
    """Inside the block no `print` fails because nobody reads it any more, or the disk behind it is full."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast("TextIO", s and tolerant(s)) for s in before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        sys.stdout, sys.stderr = before


def tolerant(stream: TextIO) -> Output:
    """The stream as an Output, which it may be already."""
    return stream if isinstance(stream, Output) else Output(stream)


def sparkline(values: Sequence[float], width: int = 32) -> str:
    """Values as bars of eighths, averaged into at most ``width`` columns.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    values = [v for v in values if math.isfinite(v)]
    if not values:
        return ""
    size = -(-len(values) // width)
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(BARS[min(7, int(8 * (m - low) / span))] for m in means)


def duration(seconds: float) -> str:
    """Seconds as people read them.

    >>> duration(7), duration(95), duration(7300)
    ('7 s', '1 min 35 s', '2 h 1 min')
    """
    s = round(seconds)
    if s < 60:
        return f"{s} s"
    return f"{s // 60} min {s % 60} s" if s < 3600 else f"{s // 3600} h {s % 3600 // 60} min"


class RunConsole:
    """Shows a run as it goes. ``quiet`` prints nothing at all."""

    def __init__(self, quiet: bool = False) -> None:
        self.output = tolerant(sys.stdout) if sys.stdout is not None else None
        self.console = Console(highlight=False, quiet=quiet, file=cast("TextIO | None", self.output))
        self._told = False
        self.live: Live | None = None
        self.title, self.steps, self.started, self.first, self.at_most = "", 0, 0.0, 0, False
        self.rewards: list[float] = []
        self.facts: Mapping[str, str] = {}
        self.activity = ""
        self.step_number = 0

    def say(self, text: str, style: str = "") -> None:
        """A line that stays: broken between words on a terminal, left whole in a file."""
        self.console.print(Text(text, style=style), soft_wrap=not self.console.is_terminal)

    def lost_output(self) -> str:
        """Why printed text reaches nobody any more, the first time this is asked; else empty."""
        if self._told or self.output is None or self.output.lost is None:
            return ""
        self._told = True
        return str(self.output.lost.strerror)

    def begin(self, title: str, steps: int, first: int = 0, at_most: bool = False) -> None:
        """A stage starts (or resumes at step ``first``); ``at_most``: it may end before all its steps."""
        self.title, self.steps, self.first, self.started = title, steps, first, time.monotonic()
        self.at_most = at_most
        self.rewards, self.facts, self.activity, self.step_number = [], {}, "", first
        if self.console.is_terminal and not self.console.quiet:
            self.live = Live(self.panel(), console=self.console, refresh_per_second=8, transient=True)
            self.live.start()

    def sampling(self, done: int, total: int, what: str = "sampling") -> None:
        """Completions come in."""
        self.doing(f"{what} {done}/{total}")

    def fewer_running(self, running: int) -> None:
        """Sampling ran out of memory."""
        self.say(f"out of memory while sampling: on with {running} completions at once", "yellow")

    def doing(self, activity: str) -> None:
        """What is happening now, in a word."""
        self.activity = activity
        self._refresh()

    def step(self, number: int, value: float, facts: Mapping[str, str]) -> None:
        """A step ended: its headline value (reward or loss) and further facts."""
        self.rewards.append(value)
        self.step_number, self.facts, self.activity = number, facts, ""
        self._refresh()
        every = max(1, self.steps // LINES_PER_STAGE)
        if self.live is None and (number % every == 0 or number == self.steps):
            shown = "  ".join(f"{k} {v}" for k, v in facts.items())
            self.say(f"{self.title} {number}/{self.steps}  {shown}  {self._time_left()}")

    def end(self) -> None:
        """The stage is over."""
        if self.live is not None:
            self.live.stop()
            self.live = None

    def _refresh(self) -> None:
        if self.live is not None:
            self.live.update(self.panel())

    def _time_left(self) -> str:
        done = self.step_number - self.first
        if not done or self.step_number >= self.steps:
            return ""
        elapsed = time.monotonic() - self.started
        left = duration(elapsed / done * (self.steps - self.step_number))
        return f"at most {left} left" if self.at_most else f"{left} left"

    def panel(self) -> RenderableType:
        """Stage, progress and time left; the reward's course and what happens now; the last step's facts."""
        width = self.console.width
        words = [Text(w) for w in (f"step {self.step_number}/{self.steps}", self._time_left()) if w]
        room = width - sum(2 + w.cell_len for w in words)
        title = Text(self.title, style="bold")
        title.truncate(max(16, room), overflow="ellipsis")
        room -= title.cell_len + 2
        bar = [_bar(self.step_number / max(self.steps, 1), min(30, room))] if room >= 8 else []
        course = Text(sparkline(self.rewards, min(32, width)), style="green")
        facts = [Text.assemble((f"{k} ", "dim"), v) for k, v in self.facts.items()]
        rows = ([title, *bar, *words], [course, Text(self.activity, style="dim")], facts)
        return Group(*(line for row in rows for line in flow([item for item in row if item], width)))


def flow(items: Sequence[Text], width: int) -> list[Text]:
    """Items side by side in as many lines as they need; none is broken unless it is wider than a line.

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
    done = round(min(share, 1.0) * width)
    return Text.assemble(("━" * done, "green"), ("━" * (width - done), "bright_black"))
