"""The time of a run by phase, with its token rates and its memory."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from covey.system.device import peak_bytes


class Clock:
    """Wall-clock seconds by phase since the last lap, and in total over resumed runs."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")
        self.started = self.since = time.monotonic()
        self.phase = ""
        """The current phase, which began at ``since``; empty between phases."""
        self.last: dict[str, float] = {}
        """Seconds of each phase when it was last passed through."""
        self.before = 0.0
        self._phases: defaultdict[str, float] = defaultdict(float)
        self._counts: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time a phase; phases do not nest."""
        self._wait()
        self.phase = phase
        self.since = time.monotonic()
        try:
            yield
        finally:
            self._wait()
            self.last[phase] = time.monotonic() - self.since
            self._phases[phase] += self.last[phase]
            self.phase = ""

    def _wait(self) -> None:
        # A GPU does its work later than it is asked to: it would count in whichever phase waits for it.
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def recall(self, laps: Iterable[Mapping[str, object]]) -> None:
        """Restore the seconds of each phase from the laps of an interrupted run, as they were logged."""
        for lap in laps:
            for name, seconds in lap.items():
                if name.startswith("seconds/") and isinstance(seconds, float | int):
                    self.last[name.removeprefix("seconds/")] = seconds

    def add(self, phase: str, seconds: float) -> None:
        """Add seconds that were measured elsewhere."""
        self._phases[phase] += seconds

    def count(self, phase: str, tokens: int) -> None:
        """Count the tokens that a phase handled, for its rate."""
        self._counts[phase] += tokens

    def lap(self, memory: Mapping[str, int]) -> dict[str, float]:
        """Return seconds and tokens per second by phase since the last lap, and start the next one.

        Includes ``memory``, the bytes of tensors by purpose, the device's peak so far and the seconds of the
        whole run.
        """
        lap = {f"seconds/{phase}": round(s, 4) for phase, s in self._phases.items()}
        for phase, tokens in self._counts.items():
            lap[f"tokens_per_second/{phase}"] = round(tokens / max(self._phases[phase], 1e-9), 1)
        lap |= {f"memory/{name.replace(' ', '_')}_mib": round(b / 2**20, 3) for name, b in memory.items()}
        lap["memory/peak_mib"] = round(peak_bytes(self.device) / 2**20, 1)
        lap["elapsed"] = round(self.total(), 3)
        self._phases.clear()
        self._counts.clear()
        return lap

    def total(self) -> float:
        """Return the seconds of the whole run, including those before a resume."""
        return self.before + time.monotonic() - self.started
