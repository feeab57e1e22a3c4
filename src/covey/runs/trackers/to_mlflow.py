"""Track a run in MLflow: files in the run folder, or the server that MLFLOW_TRACKING_URI names."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path

import mlflow

from covey.runs.trackers import identity_of, title_of

LONGEST = 250
"""Largest number of characters of a name."""
PER_CALL = 100
"""Largest number of settings per call."""


class MLflow:
    """A tracker that writes a run of the MLflow experiment `covey`."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of a step."""
        mlflow.log_metrics({allowed(name): value for name, value in values.items()}, step=step)

    def close(self) -> None:
        """End the run."""
        mlflow.end_run()


def allowed(name: str) -> str:
    """Return a name as MLflow allows it: letters, digits, _ - . : / and space, without `.` and `..` parts.

    >>> allowed("held_out/pass@1"), allowed("reward//é/../mean")
    ('held_out/pass_1', 'reward/_/_/mean')
    """
    parts = (re.sub(r"[^0-9A-Za-z_\-. :]", "_", part) for part in name.split("/") if part)
    return "/".join("_" if set(part) == {"."} else part for part in parts)[:LONGEST] or "_"


def begin_mlflow(run: Path, settings: Mapping[str, object], first: int) -> MLflow:
    """Begin a new MLflow run each time; the name of one that continues says from which step."""
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    place = run.resolve()
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # else a database is asked for, and its packages
    mlflow.set_tracking_uri(os.environ.get("MLFLOW_TRACKING_URI") or (place / "mlruns").as_uri())
    mlflow.set_experiment("covey")
    begun = f" from {first}" if first else ""
    mlflow.start_run(run_name=title_of(run) + begun, tags={"covey.identity": identity_of(run)})
    told = [(allowed(name), str(value)[:500]) for name, value in settings.items()]
    # MLflow refuses larger calls.
    for start in range(0, len(told), PER_CALL):
        mlflow.log_params(dict(told[start : start + PER_CALL]))
    return MLflow()
