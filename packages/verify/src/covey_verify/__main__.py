"""`covey-verify`: rewards over a file of completions, and attacks on rewards."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from covey_verify import __version__
from covey_verify.contract import RewardFunction
from covey_verify.errors import ConfigError, CoveyError
from covey_verify.loading import load
from covey_verify.sandbox.base import SandboxBackend
from covey_verify.sandbox.choice import MAKERS, choose
from covey_verify.scoring import read_rows, score_file, table
from covey_verify.stress import attack


def main(words: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code: 0, 1 if an attack was paid, or the code of an error."""
    arguments = _parser().parse_args(words)
    try:
        functions = _functions(arguments)
        return score(arguments, functions) if arguments.command == "score" else stress(arguments, functions)
    except CoveyError as error:
        say(f"covey-verify: {error}")
        return error.code


def score(arguments: argparse.Namespace, functions: Sequence[RewardFunction]) -> int:
    """Print each row with its rewards, then the mean of each reward.

    Return 1 if one of the functions judged no row.
    """
    records = score_file(arguments.file, functions, say)
    for record in records:
        print(json.dumps(record) if arguments.json else _line(record))
    lines = table(records, [f.name for f in functions])
    for line in lines:
        say(line)
    return int(any(all(r["rewards"][f.name] is None for r in records) for f in functions))


def stress(arguments: argparse.Namespace, functions: Sequence[RewardFunction]) -> int:
    """Print the attacks that were paid. Return 1 if there are any."""
    rows = [row for row, _, _ in read_rows(arguments.file)]
    report = attack(functions, rows)
    for note in report.notes:
        say(f"not tested: {note}")
    for finding in report.findings:
        print(json.dumps(vars(finding)) if arguments.json else finding)
    say(report.summary)
    return int(bool(report.findings))


def say(line: str) -> None:
    """Print a line on standard error, apart from the results."""
    print(line, file=sys.stderr)


def _line(record: dict[str, object]) -> str:
    """Return a row's rewards as one line."""
    return json.dumps(
        {name: record[name] for name in ("rewards", "status", "extracted", "detail") if record[name]}
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="covey-verify", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    helps = {
        "score": "apply rewards to the completions of a file",
        "stress": "list incorrect texts that rewards pay",
    }
    for name, summary in helps.items():
        command = commands.add_parser(name, help=summary)
        command.add_argument(
            "file", type=Path, help="JSONL file of rows with the columns that the rewards ask for"
        )
        command.add_argument(
            "--reward",
            nargs="+",
            action="append",
            required=True,
            metavar=("NAME", "SETTING=VALUE"),
            help="a built-in name or file.py:function, and settings; may be given several times",
        )
        command.add_argument("--sandbox", choices=["auto", *MAKERS], default="auto", help="sandbox for code")
        command.add_argument("--sandbox-url", help="URL of a SandboxFusion service")
        command.add_argument(
            "--unsafe-local", action="store_true", help="run code with your rights if there is no sandbox"
        )
        command.add_argument("--json", action="store_true", help="print JSON, an object in each line")
    return parser


def _functions(arguments: argparse.Namespace) -> list[RewardFunction]:
    # Called only for a reward that runs code, because the choice probes the machine.
    def sandbox() -> SandboxBackend:
        return choose(arguments.sandbox, arguments.sandbox_url, arguments.unsafe_local).sandbox

    functions = [_function(words, sandbox) for words in arguments.reward]
    names = [function.name for function in functions]
    if len(set(names)) < len(names):
        raise ConfigError(f"{', '.join(names)}: name each reward once")
    return functions


def _function(words: Sequence[str], sandbox: Callable[[], SandboxBackend]) -> RewardFunction:
    """Return a reward from its words: its name and SETTING=VALUE. A value that is no JSON is a text."""
    name, *pairs = words
    settings = dict[str, object]()
    for pair in pairs:
        setting, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(
                f"--reward {name}: {pair!r} is not SETTING=VALUE; each reward needs its own --reward"
            )
        try:
            settings[setting] = json.loads(value)
        except ValueError:
            settings[setting] = value
    return load(name, settings, sandbox=sandbox)


if __name__ == "__main__":
    sys.exit(main())
