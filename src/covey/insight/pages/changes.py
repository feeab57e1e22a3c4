"""The changes that a reader can make from the pages: tags, and the trash."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from threading import Lock

from covey.insight.pages.records import Runs
from covey.insight.pages.thinning import Record
from covey.runs.removal import move_to_trash, pipeline_of, put_back
from covey.runs.state import host_elsewhere, run_state
from covey.runs.tags import write_tags
from covey_verify.errors import ConfigError


class Changes:
    """Changes to the runs below a folder, one at a time; what went to the trash can be put back."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self.trashed: dict[str, tuple[Path, Path]] = {}
        """Name of a run -> its folder before, and where that is in the trash."""
        # Requests run in threads, and a file that is being written has one temporary name.
        self.busy = Lock()

    def tag(self, request: Record) -> Record:
        """Replace the tags of a run. Raises ConfigError."""
        with self.busy:
            return {"tags": write_tags(self.runs.folder(_text(request, "run")), request.get("tags"))}

    def trash(self, request: Record) -> Record:
        """Move a run, with the pipeline that it is a stage of, to the trash.

        ``request["ended_on"]`` has the hosts of which the reader knows that the run has ended there. Raises
        ConfigError if it is not to be deleted from here, FolderBusy if it is at work.
        """
        name = _text(request, "run")
        hosts = request.get("ended_on")
        ended_on = hosts if isinstance(hosts, list) else []
        with self.busy:
            folder = self.runs.folder(name)
            home = pipeline_of(folder)
            for run, path in self.runs.folders().items():
                if not path.is_relative_to(home) or run_state(path) != "training":
                    continue
                host = host_elsewhere(path)
                if not host:
                    raise ConfigError(f"{run} is training. End it first")
                if host not in ended_on:
                    raise ConfigError(
                        f"{run} may be training on {host}, which cannot be seen from here. Confirm that it "
                        "has ended there"
                    )
            assert self.runs.root is not None
            self.trashed[name] = move_to_trash(folder, self.runs.root)
            return {"place": str(self.trashed[name][1])}

    def restore(self, request: Record) -> Record:
        """Put a run back that was moved to the trash since the pages were started. Raises ConfigError."""
        name = _text(request, "run")
        with self.busy:
            if name not in self.trashed:
                raise ConfigError(f"{name} was not moved to the trash from here")
            put_back(*self.trashed[name])
            del self.trashed[name]
            return {}


def _text(request: Mapping[str, object], name: str) -> str:
    value = request.get(name)
    if not isinstance(value, str):
        raise ConfigError(f"{name} is missing")
    return value
