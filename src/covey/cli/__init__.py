"""The command line: a file for each group of commands in `covey --help`, and the tables that some print."""

from covey.cli import before, learn, models, rewards, runs, train
from covey.cli.entry_point import main
from covey.cli.options import app

__all__ = ["app", "before", "learn", "main", "models", "rewards", "runs", "train"]
