"""The command line: its commands, and the tables that some of them print."""

from covey.cli import choosing, looking, pages
from covey.cli.commands import app, main

__all__ = ["app", "choosing", "looking", "main", "pages"]
