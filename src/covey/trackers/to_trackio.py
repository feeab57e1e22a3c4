"""Trackio: a local database. `trackio show` opens its page; it uploads only if TRACKIO_SPACE_ID is set."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import trackio


class Trackio:
    """A run, the same one after a resume."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a step."""
        trackio.log(dict(values), step=step)

    def close(self) -> None:
        """Write what is left."""
        trackio.finish()


def begin(run: Path, settings: Mapping[str, object], first: int) -> Trackio:  # noqa: ARG001 - it knows
    """Begin, or go on."""
    place = run.resolve()
    trackio.init(
        project="covey", name=f"{place.parent.name}/{place.name}", config=dict(settings), resume="allow"
    )
    return Trackio()
