"""`covey new`: a task that runs as it is, in five files that a user replaces by their own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import covey
from covey_verify.errors import ConfigError

FILES = ("README.md", "rows.py", "rewards.py", "test_rewards.py", "run.yaml")


def write_task(folder: Path, model: str = "") -> None:
    """Write the files into a new or empty folder, with ``model`` in the config if one is given.

    Raises ConfigError if the folder has files, or is none.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; name a folder that does not exist yet")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} has files already; name a folder that does not exist yet")
    texts = {name: (_source() / name).read_text("utf-8") for name in FILES}
    if model:
        # A file or folder is found from anywhere; other names are hub ids, or words such as `tiny`.
        source = str(Path(model).resolve()) if Path(model).exists() else model
        texts["run.yaml"] = re.sub(
            r"(?m)^model: \S+", lambda _: f"model: {json.dumps(source)}", texts["run.yaml"]
        )
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for name, text in texts.items():
            (folder / name).write_text(text, "utf-8")
    except OSError:  # the disk is full: without these files the command can be repeated
        for name in texts:
            (folder / name).unlink(missing_ok=True)
        raise


def _source() -> Path:
    """Return the folder of the task that is copied: examples/dates; an installed package has a copy of it."""
    package = Path(covey.__file__).parent
    brought = package / "new_task"
    return brought if brought.exists() else package.parents[1] / "examples" / "dates"
