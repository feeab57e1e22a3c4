"""Trackio: a local database. `trackio show` opens its page; it uploads only if TRACKIO_SPACE_ID is set."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import trackio

from covey.trackers import identity_of, title_of


class Trackio:
    """A run, the same one after a resume."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a step."""
        trackio.log(dict(values), step=step)

    def close(self) -> None:
        """Write what is left."""
        trackio.finish()


def begin_trackio(run: Path, settings: Mapping[str, object], first: int) -> Trackio:  # noqa: ARG001 - it knows
    """Begin, or go on: it knows a run by its name alone, so that this has the identity in it."""
    for module in ("trackio", "trackio.run", "trackio.utils"):  # it prints, and has no setting against that
        vars(sys.modules.get(module, trackio))["print"] = lambda *_, **__: None
    trackio.init(
        project="covey",
        name=f"{title_of(run)} {identity_of(run)[:8]}",
        config=dict(settings),
        auto_log_cpu=False,
        auto_log_gpu=False,
        resume="allow",
    )
    return Trackio()
