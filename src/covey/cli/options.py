"""The program's name, the options that several commands share, and how a command prints."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter, validators

from covey.cli.groups import OPTIONS
from covey.system.console import say_aside
from covey.system.text import escape_controls, json_line
from covey_verify.errors import ConfigError

if TYPE_CHECKING:
    from covey.config.load import ResolvedConfig

app = App(
    name="covey",
    group_commands=OPTIONS,
    help="Train language models by reinforcement learning without a critic.",
    help_format="plaintext",
    suppress_keyboard_interrupt=False,
)
app.register_install_completion_command(help="Complete commands and options in this shell.", group=OPTIONS)

SettingArguments = Annotated[
    str,
    Parameter(
        allow_leading_hyphen=True,
        help="A setting of the config, as --section.key value, for every stage. "
        "For one stage: --stages.2.section.key value.",
    ),
]
RewardArguments = Annotated[
    str,
    Parameter(
        allow_leading_hyphen=True,
        help="Built-in names, module.py:function, or a file with all its rewards; or a config or run, whose "
        "weights, gates, scoring and sandbox then hold too, with settings as --section.key value.",
    ),
]
Json = Annotated[bool, Parameter(name="--json", negative=(), help="Print one JSON object, nothing else.")]

Trust = Annotated[
    bool,
    Parameter(
        negative=(),
        help="Run the code and ask the servers that a run names, even if you did not start the run.",
    ),
]


OpenBrowser = Annotated[
    bool, Parameter(name="--open", negative="--no-open", help="Open a browser, where there is one.")
]


@Parameter(name="*")
@dataclass(frozen=True)
class RunFlags:
    """Command-line options that are not part of the config."""

    max_minutes: Annotated[float | None, Parameter(validator=validators.Number(gt=0))] = None
    """Save the state and stop after this many minutes (exit code 75)."""
    strict: bool = False
    """Refuse a damaged checkpoint, or anything else that would not continue exactly."""
    inject: str = ""
    """Inject faults, such as reward.hang@7,save.enospc@3: see docs/reliability.md."""


NO_FLAGS = RunFlags()


def load_resolved(
    config: Path,
    settings: Sequence[str],
    as_json: bool,
    trained: bool = False,
    trust: bool = False,
    names_only: bool = True,
) -> ResolvedConfig:
    """Load the config of a YAML file or a run's folder; with ``trained``, with the run's newest model.

    ``trust`` and ``names_only`` are passed to ``load_run``.
    """
    # Imported only here, as in all commands, so that `covey --help` does not wait for pydantic or torch.
    if config.is_dir():
        from covey.runs.reader import load_for_reading, load_run

        resolved = (
            load_run(config, settings, None, trust, names_only)
            if trained
            else load_for_reading(config, settings)
        )
    else:
        from covey.config.load import load_config

        resolved = load_config(config, settings)
    print_remarks(as_json, (f"note: {note}" for note in resolved.notes))
    return resolved


def json_object(text: str, option: str) -> dict[str, object]:
    """Return the JSON object given to ``option``; an empty text gives an empty object. Raises ConfigError."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"{option}: {text!r} is not a JSON object")
    return value


def print_result(as_json: bool, value: object, lines: Iterable[str]) -> None:
    """Print a command's result: one JSON object, or lines of text."""
    for line in [json_line(value)] if as_json else lines:
        print(escape_controls(line))


def print_remarks(as_json: bool, lines: Iterable[str]) -> None:
    """Print remarks on standard error; with ``as_json`` print none, as a program reads the output."""
    if not as_json:
        for line in lines:
            say_aside(line)
