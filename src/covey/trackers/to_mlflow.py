"""MLflow: files in the run folder, or the server that MLFLOW_TRACKING_URI names."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import mlflow


class MLflow:
    """A run of the experiment `covey`."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a step."""
        mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        """End the run."""
        mlflow.end_run()


def begin_mlflow(run: Path, settings: Mapping[str, object], first: int) -> MLflow:
    """A new MLflow run each time: one that goes on says from which step."""
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    place = run.resolve()
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # else a database is asked for, and its packages
    mlflow.set_tracking_uri(os.environ.get("MLFLOW_TRACKING_URI") or (place / "mlruns").as_uri())
    mlflow.set_experiment("covey")
    mlflow.start_run(run_name=f"{place.parent.name}/{place.name}" + (f" from {first}" if first else ""))
    mlflow.log_params({name: str(value)[:500] for name, value in settings.items()})
    return MLflow()
