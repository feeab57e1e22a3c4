"""Errors that a user can repair, each with an exit code, and short texts of other errors."""

from __future__ import annotations

import traceback
from pathlib import Path


class CoveyError(Exception):
    """A mistake that a user can repair; its message says what is wrong, where, and what to do.

    The command line prints it without a traceback and exits with ``code``.
    """

    code = 1
    joint = False
    """Whether all processes of a run raise it, so that only one prints it."""


class ConfigError(CoveyError):
    """A setting that is wrong, unknown or contradicts another one."""

    code = 2


class DataError(CoveyError):
    """A data file or a row in it that cannot be used."""

    code = 3


class RewardError(CoveyError):
    """A reward function broke its contract, or scoring fails too often to continue."""

    code = 5


class SandboxUnavailable(CoveyError):
    """None of the requested backends is safe, so model code is not run at all."""

    code = 2


def describe_error(error: BaseException, file: str) -> str:
    """Return an exception in one line: its message, and the last line of the user's file that led to it."""
    try:
        words = f"{type(error).__name__}: {error}"
    except Exception:
        words = type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if f.filename == file]
    if isinstance(error, SyntaxError) or not theirs:
        return words[:600]
    last = theirs[-1]
    return f"{words[:400]} ({Path(last.filename).name}:{last.lineno}: {(last.line or '').strip()[:100]})"


def trace_of(error: BaseException) -> str:
    """Return the end of an exception's trace."""
    return "".join(traceback.format_exception(error)[-4:])
