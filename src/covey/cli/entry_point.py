"""The entry point: a user's mistake ends in one message and an exit code."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from cyclopts import CycloptsError, MissingArgumentError, UnusedCliTokensError

from covey.cli.options import app, print_result
from covey.errors import as_error, disk_error, is_panic
from covey.system.console import Output, tolerant_output
from covey.system.parent import CRASHED
from covey.system.processes import reported_by_another
from covey.system.text import escape_controls
from covey_verify.errors import ConfigError, CoveyError

TRAINING_COMMANDS = {"demo", "train", "resume", "sweep"}
"""Commands whose result is in a folder, so that lost output does not matter."""


def main(arguments: Sequence[str]) -> int:
    """Run a command; a user's mistake ends in one message and an exit code, never a traceback."""
    if os.environ.get("COLUMNS") == "0":  # some terminals mean "unknown", but rich would wrap at 0
        del os.environ["COLUMNS"]
    with tolerant_output():
        try:
            code = app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
            # The result of a training is in its folder, so lost output is not an error.
            if not TRAINING_COMMANDS.intersection(arguments[:1]):
                _check_output()
            return int(code or 0)
        except KeyboardInterrupt:
            print("error: stopped by SIGINT; there was nothing to save", file=sys.stderr)
            return 130
        except BaseException as caught:
            # Rust panics (tokenizers) are BaseExceptions, but are reported as errors like any other.
            if not (isinstance(caught, Exception | SystemExit) or is_panic(caught)):
                raise
            error = _as_covey_error(caught)
            if reported_by_another(error):
                return error.code
            if "--json" in arguments:
                print_result(True, {"error": str(error), "exit_code": error.code}, ())
            print(f"{'' if error.code == 75 else 'error: '}{escape_controls(str(error))}", file=sys.stderr)
            return error.code


def _check_output() -> None:
    """Raise OutOfRoom if output could not be written, as it is the only result of the command.

    It is no error if the reader closed the pipe, as `| head` does.
    """
    if isinstance(sys.stdout, Output):
        sys.stdout.flush()
        error = sys.stdout.lost
        if error is not None and error.errno != errno.EPIPE:
            raise disk_error(error, "standard output")


def _as_covey_error(caught: BaseException) -> CoveyError:
    """Return an exception that ended a command as a CoveyError."""
    if isinstance(caught, CycloptsError):
        return _usage_error(caught)
    if isinstance(caught, FileNotFoundError) and not _has_current_folder():
        return ConfigError("the folder that the command was started in is gone; change to one that exists")
    return _exit_error(caught) if isinstance(caught, SystemExit) else as_error(caught)


def _has_current_folder() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return False
    return True


def _usage_error(caught: CycloptsError) -> CoveyError:
    """Return the error for a command line that does not fit its command."""
    command = " ".join(("covey", *(caught.command_chain or ())))
    message = str(caught)
    if isinstance(caught, MissingArgumentError) and caught.argument is not None and not caught.keyword:
        name = caught.argument.name
        if caught.argument.field_info.is_positional:
            name = name.lstrip("-").upper()
        message = f"{name} is missing."
    if isinstance(caught, UnusedCliTokensError):
        message = f"{command} takes no {' '.join(caught.unused_tokens or ())!r}."
    return ConfigError(f"{message}{'' if message.endswith('.') else '.'} See {command} --help")


def _exit_error(caught: SystemExit) -> CoveyError:
    """Return the error for user code that called sys.exit."""
    frame = traceback.extract_tb(caught.__traceback__)[-1]
    error = CoveyError(
        f"{frame.filename}:{frame.lineno} ended the program (exit code {caught.code}); remove that"
    )
    error.code = CRASHED
    return error
