"""The command line: commands, and the tables some of them print."""

from covey.cli import looking  # noqa: F401 - its commands
from covey.cli.commands import app, main

__all__ = ["app", "main"]
