"""What a run learns from, checked before a model is loaded: problems, rewards and tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from covey.calling.running import Toolbox
from covey.calling.use import beginning, columns_asked, toolbox_of, with_schemas
from covey.cluster.judges import placed_link
from covey.config.load import Loaded
from covey.console import RunConsole
from covey.learned import forget, rewards_of
from covey.rewards.base import Rewards
from covey.tasks.columns import own_systems, readers, told
from covey.tasks.preflight import usable_problems
from covey.tasks.source import Source, load_source
from covey.training.run import RunOptions


@dataclass(frozen=True)
class Task:
    """What is asked of a model, and who judges it."""

    source: Source
    rewards: Rewards
    toolbox: Toolbox | None
    """The tools that the model may call."""


def checked_task(loaded: Loaded, console: RunConsole, options: RunOptions) -> Task:
    """Load problems, rewards and tools, try them on each other, and say what a user should know of them.

    Raises ConfigError, DataError or RewardError.
    """
    source = load_source(loaded)
    rewards = judges(loaded, source, options)
    toolbox = toolbox_of(loaded)
    if toolbox is not None and toolbox.chosen is not None:
        rewards.sandbox = toolbox.chosen.record()
    source = with_schemas(source, toolbox, console.say)
    source = usable_problems(source, rewards, loaded, console, partial(beginning, toolbox))
    for note in own_systems(source.problems, loaded.config.data):
        console.say(note, "yellow")
    task = Task(source, rewards, toolbox)
    if loaded.config.data.task is None:
        _account_for_columns(task, loaded, console.say)
    return task


def _account_for_columns(task: Task, loaded: Loaded, say: Callable[[str], None]) -> None:
    """Say who reads each column of the data, and which ones nobody reads."""
    config, source = loaded.config, task.source
    role = loaded.algorithm.advantage.all_settings.get("by") if config.method == "rl" else None
    asked: Mapping[str, set[str]] = {
        **columns_asked(task.toolbox, source.problems),
        "algorithm.advantage.by": {str(role)},
    }
    told(readers(source.problems, source.all_examples, config.data, task.rewards, asked), say)


def judges(loaded: Loaded, source: Source, options: RunOptions) -> Rewards:
    """The rewards of a run; none where a method learns without and no rewards are named."""
    config = loaded.config
    named = config.rewards or source.rewards
    if source.examples and (not named or config.method == "reward_model"):
        forget()
        return Rewards(())
    rewards = rewards_of(loaded, named, options.faults.around)
    if config.launch.ray is not None:
        rewards.link = partial(placed_link, config.launch.ray)
    return rewards
