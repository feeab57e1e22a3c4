"""The task of a run: problems, rewards and tools, checked before a model is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from covey.cluster.reward_workers import placed_link
from covey.config.load import ResolvedConfig
from covey.rewards.scorer import Rewards
from covey.rollouts.learned import rewards_of
from covey.sampling.tools.running import Toolbox
from covey.sampling.tools.use import columns_asked, initial_state, toolbox_of, with_schemas
from covey.system.console import RunConsole
from covey.system.text import Say
from covey.tasks.columns import find_readers, print_readers, system_notes
from covey.tasks.examples import require_both_labels
from covey.tasks.preflight import check_problems
from covey.tasks.source import Source, load_source
from covey.training.options import RunOptions


@dataclass(frozen=True)
class RunTask:
    """The problems of a run, their rewards and its tools."""

    source: Source
    rewards: Rewards
    toolbox: Toolbox | None
    """The tools that the model may call."""


def checked_task(resolved: ResolvedConfig, console: RunConsole, options: RunOptions) -> RunTask:
    """Load problems, rewards and tools, try them on each other, and print notes for the user.

    Raises ConfigError, DataError or RewardError.
    """
    source = load_source(resolved)
    if options.trains:
        require_both_labels(source.examples)
    rewards = rewards_of_run(resolved, source, options)
    toolbox = toolbox_of(resolved)
    # The sandbox that was found to work is recorded with the rewards.
    if toolbox is not None and toolbox.chosen is not None:
        rewards = replace(rewards, sandbox=toolbox.chosen.record())
    source = with_schemas(source, toolbox, console.say)
    source = check_problems(source, rewards, resolved, console, partial(initial_state, toolbox))
    for note in system_notes(source.problems, resolved.config.data):
        console.say(note, "yellow")
    task = RunTask(source, rewards, toolbox)
    if resolved.config.data.task is None:
        _account_for_columns(task, resolved, console.say)
    return task


def _account_for_columns(task: RunTask, resolved: ResolvedConfig, say: Say) -> None:
    """Print who reads each column of the data, and which columns nobody reads."""
    config = resolved.config
    source = task.source
    role = resolved.algorithm.advantage.all_settings.get("by") if config.method == "rl" else None
    readers_besides: Mapping[str, set[str]] = {
        **columns_asked(task.toolbox, source.problems),
        "algorithm.advantage.by": {str(role)},
    }
    by_column = find_readers(source.problems, source.all_examples, config.data, task.rewards, readers_besides)
    print_readers(by_column, say)


def rewards_of_run(resolved: ResolvedConfig, source: Source, options: RunOptions) -> Rewards:
    """Return the rewards of a run; none if the method needs none and the config names none."""
    config = resolved.config
    named = config.rewards or source.rewards
    if source.examples and (not named or config.method == "reward_model"):
        return Rewards(())
    rewards = rewards_of(resolved, named, options.faults.around)
    if config.launch.ray is None:
        return rewards
    # Under Ray the worker of a user's function runs on whichever node has room.
    return replace(rewards, link=partial(placed_link, config.launch.ray))
