"""A run's panel in a notebook: one output of the cell, updated during the run."""

from __future__ import annotations

import html
import importlib
import io
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console, RenderableType

SECONDS = 1.0
"""Seconds between two looks at the panel."""
PRE = '<pre style="line-height: normal; font-family: monospace">{code}</pre>'


class NotebookPanel:
    """Shows what ``panel`` returns from `start` until `stop`, after which the last state stays."""

    def __init__(self, panel: Callable[[], RenderableType], width: int) -> None:
        self.panel = panel
        self.width = width
        self._display = importlib.import_module("IPython.display")  # there is one where there is a notebook
        self._ended = threading.Event()
        self._shown = ""

    def start(self) -> None:
        """Make the output, and look at the panel from a thread: the run may be busy for minutes."""
        self._handle = self._display.display(self._display.HTML(""), display_id=True)
        self._thread = threading.Thread(target=self._watch, name="notebook", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Show the panel's last state."""
        self._ended.set()
        self._thread.join()
        self._update()

    def _watch(self) -> None:
        while not self._ended.wait(SECONDS):
            self._update()

    def _update(self) -> None:
        text = as_html(self.panel(), self.width)
        if text != self._shown:
            self._shown = text
            self._handle.update(self._display.HTML(text))


def as_html(shown: RenderableType, width: int) -> str:
    """Return what rich would print as HTML, in characters of one width."""
    console = Console(file=io.StringIO(), record=True, width=width, force_terminal=True, force_jupyter=False)
    console.print(shown)
    return console.export_html(inline_styles=True, code_format=PRE)


def result_html(lines: Sequence[str], chart: Path | None = None) -> str:
    """Return lines of text and an SVG chart, if there is one, for a notebook."""
    text = "".join(f"<div>{html.escape(line)}</div>" for line in lines)
    return text + (chart.read_text("utf-8") if chart is not None and chart.is_file() else "")
