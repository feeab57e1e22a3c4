"""The problems a config asks for: built-in task or files, training and held-out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from covey.config.given import GivenRows
from covey.config.load import Loaded
from covey.errors import ConfigError
from covey.tasks import TASKS, gym
from covey.tasks.files import given_problems, read_problems
from covey.tasks.generated import problems
from covey.types import Problem


@dataclass(frozen=True)
class Source:
    """Training and held-out problems, and the rewards their task comes with."""

    train: list[Problem]
    test: list[Problem]
    rewards: tuple[object, ...] = ()


def load_problems(loaded: Loaded) -> Source:
    """Read or generate the problems of a config. Raises DataError or ConfigError."""
    data = loaded.config.data
    if data.task is not None and data.train is not None:
        raise ConfigError("data: give either task or train, not both")
    if data.task is not None and data.task.startswith(gym.PREFIX):
        train = gym.gym_problems(data.task, "train", data.train_size)
        return Source(train, gym.gym_problems(data.task, "test", data.test_size), gym.GYM_REWARDS)
    if data.task is not None:
        if data.task not in TASKS:
            raise ConfigError(f"data.task: {data.task!r} is unknown; known: {', '.join(sorted(TASKS))}")
        task = TASKS[data.task]
        train = problems(task, "train", data.train_size)
        by_step = task.steps if loaded.algorithm.credit == "step" else ()
        return Source(train, problems(task, "test", data.test_size), (*task.rewards, *by_step))
    if data.train is None:
        raise ConfigError("data: nothing to train on; set data.train to a file or data.task to a task")
    train, test = (_read(where, loaded) if where is not None else [] for where in (data.train, data.test))
    return Source(train, test[: data.test_size])


def _read(where: Path | GivenRows, loaded: Loaded) -> list[Problem]:
    data = loaded.config.data
    if isinstance(where, GivenRows):
        return given_problems(where, data)
    return read_problems(_resolve(where, loaded.folder), data)


def data_files(loaded: Loaded) -> list[Path]:
    """The data files of a config."""
    data = loaded.config.data
    return [_resolve(path, loaded.folder) for path in (data.train, data.test) if isinstance(path, Path)]


def _resolve(path: Path, folder: Path) -> Path:
    """A path as the user means it: from the config's folder, else from the working directory."""
    beside = folder / path
    return beside if beside.exists() or path.is_absolute() else path
