"""The command line: commands, and the tables some of them print."""

from covey.cli import looking, pages
from covey.cli.commands import app, main

__all__ = ["app", "looking", "main", "pages"]
