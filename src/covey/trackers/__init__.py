"""Trackers: copies of a run's numbers for other programs' pages. The run folder stays the truth."""

from __future__ import annotations

import hashlib
import importlib
import math
import queue
import threading
import uuid
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from covey_verify.errors import ConfigError

TRACKER_PACKAGES: Mapping[str, str] = {
    "wandb": "wandb",
    "tensorboard": "tensorboardX",
    "trackio": "trackio",
    "mlflow": "mlflow",
}
"""Tracker -> the package that its file wraps."""
IDENTITY = "identity"
"""In the folder of a run that has a tracker."""
WAITS = 60.0
"""Seconds that the end of a run gives a tracker to write what is left."""
WAITING = 1_000
"""Records that may wait for a tracker; of one that is slower than the run, later ones are dropped."""


class Tracker(Protocol):
    """What a file here makes of its package."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a step, all finite."""

    def close(self) -> None:
        """Nothing more comes."""


class OpenTracker(Protocol):
    """``begin_...`` of a file here: the tracker of a run; ``first`` is the step it begins or goes on with."""

    def __call__(self, run: Path, settings: Mapping[str, object], first: int) -> Tracker:
        """Begin, or go on."""


def check_tracker(name: str | None) -> None:
    """Raise ConfigError where the package of a tracker is not installed."""
    if name is not None and find_spec(TRACKER_PACKAGES[name]) is None:
        raise ConfigError(
            f"tracker: {name} needs {TRACKER_PACKAGES[name]}, which is not installed: pip install "
            f"'covey[{name}]' or leave it out; the run folder has everything"
        )


def identity_of(run: Path) -> str:
    """Of a run in its folder: 32 characters, made when they are first asked for, which a resume finds again.

    A folder that was removed and begun anew is another run, and so is a copy in another place.
    """
    path = run / IDENTITY
    if not path.is_file():
        path.write_text(uuid.uuid4().hex, encoding="ascii")
    own = f"{path.read_text(encoding='utf-8', errors='replace').strip()} {run.resolve()}"
    return hashlib.sha256(own.encode(errors="surrogateescape")).hexdigest()[:32]


def title_of(run: Path) -> str:
    """What people call a run: its folder and the one around it; several may be called so."""
    place = run.resolve()
    return f"{place.parent.name}/{place.name}"


def named(name: str) -> OpenTracker:
    """What begins a tracker."""
    return getattr(importlib.import_module(f"covey.trackers.to_{name}"), f"begin_{name}")


class Tracking:
    """Feeds a tracker from a thread of its own: that it fails or hangs is nothing to a run."""

    def __init__(self, begin: Callable[[], Tracker], failed: Callable[[str], None]) -> None:
        """``failed`` is told once why there is nothing more to come."""
        self.begin, self.failed = begin, failed
        self.records: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue(WAITING)
        self.reason = ""
        self.told = False
        self.thread = threading.Thread(target=self._work, name="tracker", daemon=True)
        self.thread.start()

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        """Numbers of a step; those that are not finite are left out."""
        known = {k: float(v) for k, v in values.items() if isinstance(v, float | int) and math.isfinite(v)}
        if not self._tell():
            try:
                self.records.put_nowait((step, known))
            except queue.Full:
                self.reason = f"it is {WAITING} records behind"

    def close(self) -> None:
        """Wait for what is left to be written, but not for ever."""
        try:
            self.records.put(None, timeout=1)
        except queue.Full:
            self.reason = self.reason or "it does not take any more"
        self.thread.join(WAITS)
        if self.thread.is_alive():
            self.reason = self.reason or f"it has not ended after {WAITS:g} seconds"
        self._tell()

    def _tell(self) -> bool:
        if self.reason and not self.told:
            self.told = True
            self.failed(self.reason)
        return bool(self.reason)

    def _work(self) -> None:
        try:
            tracker = self.begin()
            while (record := self.records.get()) is not None:
                tracker.log(*record)
            tracker.close()
        except BaseException as error:
            self.reason = f"{type(error).__name__}: {str(error).strip()[:300]}"
