"""Tracking in Trackio's local database, shown by `trackio show`; uploads only with TRACKIO_SPACE_ID."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import trackio

from covey.runs.trackers import Tracker, run_identity, title_of


def begin_trackio(run: Path, settings: Mapping[str, object], _first: int) -> Tracker:
    """Begin or continue. Trackio knows a run by its name alone, so the name includes the identity."""
    for module in ("trackio", "trackio.run", "trackio.utils"):  # it prints, and has no setting against that
        vars(sys.modules.get(module, trackio))["print"] = lambda *_, **__: None
    trackio.init(
        project="covey",
        name=f"{title_of(run)} {run_identity(run)[:8]}",
        config=dict(settings),
        auto_log_cpu=False,
        auto_log_gpu=False,
        resume="allow",
    )
    return Tracker(_log, trackio.finish)


def _log(step: int, values: Mapping[str, float]) -> None:
    trackio.log(dict(values), step=step)
