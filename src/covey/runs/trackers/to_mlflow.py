"""Tracking in MLflow: files in the run folder, or the server that MLFLOW_TRACKING_URI names."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path

import mlflow

from covey.runs.trackers import Tracker, run_identity, title_of

MAX_METRIC_NAME = 250
"""Largest number of characters of a name."""
MAX_SETTINGS_PER_CALL = 100
"""Largest number of settings per call."""


def allowed_name(name: str) -> str:
    """Return a name as MLflow allows it: letters, digits, _ - . : / and space, without `.` and `..` parts.

    >>> allowed_name("held_out/pass@1"), allowed_name("reward//é/../mean")
    ('held_out/pass_1', 'reward/_/_/mean')
    """
    parts = (re.sub(r"[^0-9A-Za-z_\-. :]", "_", part) for part in name.split("/") if part)
    return "/".join("_" if set(part) == {"."} else part for part in parts)[:MAX_METRIC_NAME] or "_"


def begin_mlflow(run: Path, settings: Mapping[str, object], first: int) -> Tracker:
    """Begin a run of the experiment `covey`, a new one each time; its name says from which step it is."""
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    folder = run.resolve()
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # else a database is asked for, and its packages
    mlflow.set_tracking_uri(os.environ.get("MLFLOW_TRACKING_URI") or (folder / "mlruns").as_uri())
    mlflow.set_experiment("covey")
    name = f"{title_of(run)} from {first}" if first else title_of(run)
    mlflow.start_run(run_name=name, tags={"covey.identity": run_identity(run)})
    parameters = [(allowed_name(name), str(value)[:500]) for name, value in settings.items()]
    # MLflow refuses larger calls.
    for start in range(0, len(parameters), MAX_SETTINGS_PER_CALL):
        mlflow.log_params(dict(parameters[start : start + MAX_SETTINGS_PER_CALL]))
    return Tracker(_log, mlflow.end_run)


def _log(step: int, values: Mapping[str, float]) -> None:
    mlflow.log_metrics({allowed_name(name): value for name, value in values.items()}, step=step)
