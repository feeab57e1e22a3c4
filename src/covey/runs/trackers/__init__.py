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
from typing import NamedTuple, Protocol

from covey.system.text import Say
from covey_verify.errors import ConfigError

TRACKER_PACKAGES: Mapping[str, str] = {
    "wandb": "wandb",
    "tensorboard": "tensorboardX",
    "trackio": "trackio",
    "mlflow": "mlflow",
}
"""Tracker -> the package that its file wraps."""
IDENTITY = "identity"
"""File in the folder of a run that has a tracker."""
MAX_WAIT_SECONDS = 60.0
"""Seconds that a run waits at its end for the tracker's last records."""
MAX_QUEUED_RECORDS = 1_000
"""Number of records that may wait for a tracker. If it falls further behind, it gets no more."""


class Tracker(NamedTuple):
    """A run that has begun in another program; each file here begins it with one package."""

    log: Callable[[int, Mapping[str, float]], object]
    """Logs the numbers of a step, all finite."""
    close: Callable[[], object]
    """Finishes: no more numbers will come."""


class OpenTracker(Protocol):
    """The type of ``begin_...`` in each file here; ``first`` is the step from which a run continues."""

    def __call__(self, run: Path, settings: Mapping[str, object], first: int) -> Tracker:
        """Return a tracker for a run that begins or continues."""


def check_tracker(name: str | None) -> None:
    """Raise ConfigError if the package of a tracker is not installed."""
    if name is not None and find_spec(TRACKER_PACKAGES[name]) is None:
        raise ConfigError(
            f"tracker: {name} needs {TRACKER_PACKAGES[name]}: pip install 'covey[{name}]', or remove the "
            "setting; the run folder has all metrics"
        )


def run_identity(run: Path) -> str:
    """Return the identity of a run in its folder: 32 characters, made once, which a resume finds again.

    A run that begins again in a removed folder has another identity, and so has a copy in another place.
    """
    path = run / IDENTITY
    if not path.is_file():
        path.write_text(uuid.uuid4().hex, encoding="ascii")
    identity = f"{path.read_text(encoding='utf-8', errors='replace').strip()} {run.resolve()}"
    return hashlib.sha256(identity.encode(errors="surrogateescape")).hexdigest()[:32]


def title_of(run: Path) -> str:
    """Return a readable name of a run, its folder and the one above; it need not be unique."""
    folder = run.resolve()
    return f"{folder.parent.name}/{folder.name}"


def tracker_opener(name: str) -> OpenTracker:
    """Return the function that begins a tracker."""
    return getattr(importlib.import_module(f"covey.runs.trackers.to_{name}"), f"begin_{name}")


class Tracking:
    """Feeds a tracker from a thread of its own, so that its failures and delays do not affect the run."""

    def __init__(self, begin: Callable[[], Tracker], failed: Say) -> None:
        """Start the thread. ``failed`` is called once with the reason if the tracker gets no more numbers."""
        self.begin = begin
        self.failed = failed
        self.records: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue(MAX_QUEUED_RECORDS)
        self.reason = ""
        self.told = False
        self.thread = threading.Thread(target=self._work, name="tracker", daemon=True)
        self.thread.start()

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        """Queue the numbers of a step; those that are not finite are left out."""
        numbers = {k: float(v) for k, v in values.items() if isinstance(v, float | int) and math.isfinite(v)}
        if not self._tell():
            try:
                self.records.put_nowait((step, numbers))
            except queue.Full:
                self.reason = f"it is {MAX_QUEUED_RECORDS} records behind"

    def close(self) -> None:
        """Wait for the last records to be written, at most ``MAX_WAIT_SECONDS`` seconds."""
        try:
            self.records.put(None, timeout=1)
        except queue.Full:
            self.reason = self.reason or "it does not take any more"
        self.thread.join(MAX_WAIT_SECONDS)
        if self.thread.is_alive():
            self.reason = self.reason or f"it has not ended after {MAX_WAIT_SECONDS:g} seconds"
        self._tell()

    def _tell(self) -> bool:
        """Tell the run once why the tracker gets no more numbers. Return whether that is so."""
        # Called by the run's thread only: `failed` prints and logs.
        if self.reason and not self.told:
            self.told = True
            self.failed(self.reason)
        return bool(self.reason)

    def _work(self) -> None:
        try:
            tracker = self.begin()
            for step, values in iter(self.records.get, None):
                tracker.log(step, values)
            tracker.close()
        except BaseException as error:
            # A package may even call sys.exit; in this thread nothing of it may reach the run.
            self.reason = f"{type(error).__name__}: {str(error).strip()[:300]}"
