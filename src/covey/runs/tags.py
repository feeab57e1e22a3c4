"""Tags of a run: words that its reader gives it, in `tags.json` of its folder."""

from __future__ import annotations

import json
from pathlib import Path

from covey.runs.atomic import write_file
from covey.system.opening import RECORD_BYTES, load_json, read_below
from covey_verify.errors import ConfigError, CoveyError

TAGS = "tags.json"
MAX_TAGS = 20
MAX_TAG_LENGTH = 40


def read_tags(folder: Path) -> list[str]:
    """Return the tags of a run; none if it has none, or none that can be read."""
    try:
        return checked_tags(load_json(read_below(folder, TAGS, RECORD_BYTES)))
    except (OSError, ValueError, CoveyError):
        return []


def write_tags(folder: Path, tags: object) -> list[str]:
    """Replace the tags of a run and return them as they are written. Raises ConfigError."""
    path = folder / TAGS
    # A write through a link would replace a file elsewhere.
    if path.is_symlink():
        raise ConfigError(f"{path} is a link. Remove it, then tag the run again")
    checked = checked_tags(tags)
    if checked:
        write_file(path, json.dumps(checked, ensure_ascii=False) + "\n")
    else:
        path.unlink(missing_ok=True)
    return checked


def checked_tags(tags: object) -> list[str]:
    """Return tags without spaces around them, each once. Raises ConfigError if they are not tags.

    >>> checked_tags(["baseline", " baseline ", "paper"])
    ['baseline', 'paper']
    """
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise ConfigError("tags are a list of words")
    words = list(dict.fromkeys(filter(None, (tag.strip() for tag in tags))))
    for tag in words:
        if len(tag) > MAX_TAG_LENGTH or not tag.isprintable() or "," in tag:
            raise ConfigError(
                f"the tag {tag!r} is longer than {MAX_TAG_LENGTH} characters, or has a comma in it"
            )
    if len(words) > MAX_TAGS:
        raise ConfigError(f"{len(words)} tags: a run has {MAX_TAGS} at most")
    return words
