"""The groups of commands in `covey --help`, by what a user is about to do."""

from __future__ import annotations

from cyclopts import Group

TRAIN = Group("Train", sort_key=0)
BEFORE = Group("Before a run", sort_key=1)
RUNS = Group("Look at runs", sort_key=2)
REWARDS = Group("Check rewards", sort_key=3)
MODELS = Group("Use a model", sort_key=4)
LEARN = Group("Learn", sort_key=5)
OPTIONS = Group("Options", sort_key=6)
