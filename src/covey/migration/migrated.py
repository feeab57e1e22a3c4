"""A config in covey's names, what had no counterpart, and both as a YAML file."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import yaml


@dataclass
class MigrationResult:
    """Settings of covey that correspond to another trainer's."""

    unread: dict[str, object]
    """The other trainer's settings that have not been read yet."""
    config: dict[str, object] = field(default_factory=dict)
    """Covey's dotted keys and values."""
    unsupported: dict[str, str] = field(default_factory=dict)
    """The other trainer's setting, with its value -> the reason why covey has no counterpart."""
    notes: list[str] = field(default_factory=list)
    """Points to check before the first run."""

    def take(self, name: str, default: object = None) -> object:
        """Return one of their settings, which counts as read, or their default."""
        return self.unread.pop(name, default)

    def number(self, name: str, default: float) -> float:
        """Return a number of theirs, or their default; a note says if theirs is no number."""
        value = self.take(name)
        if value is not None and not isinstance(value, int | float):
            self.notes.append(f"{name}: {value} is not a number; this is {default:g}")
        return default if value is None or not isinstance(value, int | float) else value

    def same(self, names: Mapping[str, str]) -> None:
        """Take over settings that mean the same."""
        for theirs, ours in names.items():
            value = self.take(theirs)
            if value is not None:
                self.config[ours] = value

    def finish(self, silent: Iterable[str], reasons: Mapping[str, str]) -> MigrationResult:
        """Name all settings that are left; patterns in ``silent`` match placement and logging."""
        for name, value in self.unread.items():
            if any(fnmatch.fnmatch(name, pattern) for pattern in silent):
                continue
            why = next((why for pattern, why in reasons.items() if fnmatch.fnmatch(name, pattern)), "")
            self.unsupported[f"{name}: {value}"] = why or "not known to covey"
        self.unread = {}
        return self


def nest_keys(config: Mapping[str, object]) -> dict[str, object]:
    """Return dotted keys as nested mappings."""
    root = dict[str, object]()
    for key, value in config.items():
        *path, last = key.split(".")
        section = root
        for name in path:
            inner = section.setdefault(name, {})
            assert isinstance(inner, dict)  # no setting is a section and a value
            section = inner
        section[last] = value
    return root


def as_yaml(migrated: MigrationResult, origin: str) -> str:
    """Return the config as a file, with comments on what to look at and what is missing."""
    lines = [f"# From {origin}, by covey migrate."]
    lines += [f"# Look at: {note}" for note in migrated.notes]
    body = yaml.safe_dump(nest_keys(migrated.config), sort_keys=False, default_flow_style=None, width=100)
    lines.append(body.rstrip())
    if migrated.unsupported:
        lines += ["", "# Without a counterpart:"]
        lines += [f"#   {setting} ({why})" for setting, why in migrated.unsupported.items()]
    return "\n".join(lines) + "\n"
