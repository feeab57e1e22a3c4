"""The settings of a run by name, for rules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import yaml

from covey.config.load import ResolvedConfig
from covey.config.python_objects import plain
from covey.objective.axis_function import AxisFunction
from covey.tasks import TASKS


class Unknown:
    """The value of every setting if nothing is known of the config."""


UNKNOWN = Unknown()
SettingOf = Callable[[str], Any]
"""A setting's name -> its value in the run, or UNKNOWN."""


def unknown(_: str) -> Unknown:
    """Look up a setting of a run whose config is unknown."""
    return UNKNOWN


def settings_of(resolved: ResolvedConfig) -> SettingOf:
    """Return a lookup of a run's resolved settings; functions of the algorithm are names, by their axis."""
    return partial(_find_setting, resolved)


def _find_setting(resolved: ResolvedConfig, name: str) -> object:
    if name == "rewards":
        task = TASKS.get(resolved.config.data.task or "")
        rewards = resolved.config.rewards or (task.rewards if task else ())
        return plain(rewards, resolved.folder)
    if name == "stages":
        # The methods of the stages before this one, read from the names of their folders.
        folder = resolved.config.output
        return [p.name.partition("-")[2] for p in folder.parent.glob("[0-9]*-*") if p != folder]
    section, *path = name.split(".")
    value: object = (
        resolved.algorithm if section == "algorithm" else getattr(resolved.config, section, UNKNOWN)
    )
    for part in path:
        # A function's own settings (algorithm.advantage.eps) are not attributes of the bound function.
        function_setting = (
            value.all_settings.get(part, UNKNOWN) if isinstance(value, AxisFunction) else UNKNOWN
        )
        value = None if value is None else getattr(value, part, function_setting)
    return value.name if isinstance(value, AxisFunction) else value


def yaml_line(key: str, value: object) -> str:
    """Return a setting as a line of a config.

    >>> yaml_line("rollout.max_tokens", 640)
    'rollout.max_tokens: 640'
    """
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000)
    # YAML ends a lone scalar with a line of dots.
    return f"{key}: {text.partition(chr(10) + '...')[0].strip()}"
