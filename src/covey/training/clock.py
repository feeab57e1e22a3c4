"""Where the time of a run goes, by phase."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from covey.training.memory import taken


class Clock:
    """Wall-clock seconds by phase since the last lap, and in total over resumed runs."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.before = 0.0
        self._phases: defaultdict[str, float] = defaultdict(float)
        self._counts: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time a phase; phases do not nest."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._phases[phase] += time.monotonic() - start

    def add(self, phase: str, seconds: float) -> None:
        """Seconds measured elsewhere."""
        self._phases[phase] += seconds

    def count(self, phase: str, tokens: int) -> None:
        """Tokens a phase has handled, for its rate."""
        self._counts[phase] += tokens

    def lap(self) -> dict[str, float]:
        """Seconds, tokens per second and peak memory since the last lap."""
        lap = {f"seconds/{phase}": round(s, 4) for phase, s in self._phases.items()}
        for phase, tokens in self._counts.items():
            lap[f"tokens_per_second/{phase}"] = round(tokens / max(self._phases[phase], 1e-9), 1)
        lap["memory/peak_mib"] = round(taken(torch.device("cpu")) / 2**20, 1)
        self._phases.clear()
        self._counts.clear()
        return lap

    def total(self) -> float:
        """Seconds of the whole run, those before a resume included."""
        return self.before + time.monotonic() - self.started
