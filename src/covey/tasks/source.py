"""The training and held-out problems that a config asks for, from a built-in task or files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from covey.config.load import ResolvedConfig
from covey.config.methods import METHODS
from covey.config.python_objects import RowsObject
from covey.config.schema import Data
from covey.rng import key, permutation
from covey.tasks import TASKS, gym
from covey.tasks.examples import Example, examples_of
from covey.tasks.files import given_problems, missing_file_message, read_problems
from covey.tasks.generated import generate_problems
from covey.tasks.hub import fetch_rows, is_hub
from covey.types import Problem
from covey_verify.errors import ConfigError, DataError

ROW_SETTINGS = ("prompt", "answer", "columns", "template", "chat", "system", "chat_template_kwargs")
"""Settings of the layout of rows in a file, which a built-in task does not use."""
EXAMPLES_FILE = "examples.jsonl"
"""Name of the file in which a stage writes its examples."""
MAX_HELD_OUT = 512
"""Largest number of examples that are held out for evaluation."""


@dataclass(frozen=True)
class Source:
    """Training and held-out problems, and the default rewards of their task."""

    train: list[Problem]
    test: list[Problem]
    rewards: tuple[object, ...] = ()
    examples: list[Example] = field(default_factory=list)
    """Examples for a method that does not sample."""
    held_out: list[Example] = field(default_factory=list)
    """Held-out pairs or judged answers for evaluation."""

    @property
    def all_examples(self) -> list[Example]:
        """All examples, for training and for evaluation."""
        return [*self.examples, *self.held_out]

    @property
    def problems(self) -> list[Problem]:
        """The problems of all rows, including examples."""
        return [*self.train, *self.test, *(e.problem for e in self.all_examples)]

    @property
    def rows(self) -> list[Problem | Example]:
        """All rows that are trained or evaluated on."""
        return [*(self.examples or self.train), *self.held_out, *self.test]


def load_source(resolved: ResolvedConfig) -> Source:
    """Return the problems of a config and the examples of its method. Raises DataError or ConfigError."""
    config = resolved.config
    data = config.data
    if not METHODS[config.method].learns_from:
        return load_problems(resolved)
    rows = [problem for problems in _example_rows(resolved) for problem in problems]
    if rows and data.task is None and data.train is None:
        # data.examples holds all training data, so there are no problems to load.
        source = Source([], _test_problems(resolved))
    else:
        source = load_problems(resolved)
    read_examples = partial(
        examples_of, method=config.method, data=data, max_ties=config.scoring.max_bad_references
    )
    examples = read_examples(rows or source.train)
    # A test file of examples is used for evaluation as it is; without one a fraction of the training
    # examples is held out.
    judged = [p for p in source.test if {"chosen", "label", "labels"} & set(p.columns)]
    if judged and config.method != "sft":
        return replace(source, examples=examples, held_out=read_examples(judged))
    fraction = data.held_out if config.method != "sft" else 0.0
    held_out = _choose_held_out([e.problem for e in examples], fraction, config.seed)
    return replace(
        source,
        examples=[e for e in examples if prompt_key(e.problem) not in held_out],
        held_out=[e for e in examples if prompt_key(e.problem) in held_out],
    )


def load_test_source(resolved: ResolvedConfig) -> Source:
    """Return the problems that a model is measured on: from `load_source`, or from ``data.test`` alone."""
    data = resolved.config.data
    if data.test is None or data.task is not None or data.train is not None:
        return load_source(resolved)
    return Source([], _test_problems(resolved))


def _test_problems(resolved: ResolvedConfig) -> list[Problem]:
    """Return the problems of ``data.test``; none if it is not set."""
    data = resolved.config.data
    return [] if data.test is None else _read_source(data.test, resolved, "test")[: data.test_size]


def _choose_held_out(problems: Sequence[Problem], fraction: float, seed: int) -> set[str]:
    """Choose the prompts to hold out; all examples of a prompt are held out, or all are trained on."""
    counts = Counter(map(prompt_key, problems))
    prompts = list(counts)
    # Number of examples that may still be held out; prompts with more examples are skipped.
    room = min(int(fraction * len(problems)), MAX_HELD_OUT)
    held_out = set[str]()
    for number in permutation(key(seed, "held out"), len(prompts)).tolist():
        prompt = prompts[number]
        if counts[prompt] <= room:
            held_out.add(prompt)
            room -= counts[prompt]
    return held_out


def prompt_key(problem: Problem) -> str:
    """Return a key that is the same for prompts that differ only in case and white space."""
    return " ".join(str(problem.prompt).casefold().split())


def _example_rows(resolved: ResolvedConfig) -> Iterator[list[Problem]]:
    """Yield the rows of each file of examples; only the fraction ``data.replay`` of all but the last file."""
    data = resolved.config.data
    for number, path in enumerate(data.examples, start=1):
        problems = _read_source(path, resolved)
        if number < len(data.examples):
            order = permutation(key(resolved.config.seed, "replay", number), len(problems)).tolist()
            problems = [problems[i] for i in sorted(order[: round(data.replay * len(problems))])]
        yield problems


def load_problems(resolved: ResolvedConfig) -> Source:
    """Read or generate the problems of a config. Raises DataError or ConfigError."""
    data = resolved.config.data
    if data.task is not None and data.train is not None:
        raise ConfigError("data: give either task or train, not both")
    if data.task is not None:
        return _task_source(data.task, resolved)
    if data.train is None:
        raise ConfigError("data: there are no problems; set data.train to a file or data.task to a task")
    return Source(_read_source(data.train, resolved), _test_problems(resolved))


def _task_source(name: str, resolved: ResolvedConfig) -> Source:
    """Return the problems and the rewards of a built-in task. Raises ConfigError."""
    data = resolved.config.data
    unused = [setting for setting in ROW_SETTINGS if getattr(data, setting) != getattr(Data(), setting)]
    if unused and not data.examples:
        raise ConfigError(
            f"data.{unused[0]}: the built-in task {name} has prompts and columns of its own; remove "
            f"{unused[0]}, or use a file (data.train)"
        )
    if name.startswith(gym.PREFIX):
        train = gym.gym_problems(name, "train", data.train_size)
        return Source(train, gym.gym_problems(name, "test", data.test_size), gym.GYM_REWARDS)
    if name not in TASKS:
        raise ConfigError(f"data.task: {name!r} is unknown; known: {', '.join(sorted(TASKS))}")
    task = TASKS[name]
    train = generate_problems(task, "train", data.train_size)
    test = generate_problems(task, "test", data.test_size)
    credits_steps = resolved.config.method == "rl" and resolved.algorithm.credit == "step"
    return Source(train, test, (*task.rewards, *task.steps) if credits_steps else task.rewards)


def _read_source(where: Path | RowsObject, resolved: ResolvedConfig, split: str = "train") -> list[Problem]:
    """Return the rows of a file, a data set of the hub, or an object from Python."""
    data = resolved.config.data
    method = resolved.config.method
    # Pairs and judged answers are compared as they are; the model answers every other row itself.
    answered = not METHODS[method].learns_from or (split == "test" and method == "sft")
    if isinstance(where, RowsObject):
        return given_problems(where, data, answered)
    file = _resolve(where, resolved.folder, split)
    if not file.is_file():
        raise DataError(missing_file_message(file, of_config=True))
    return read_problems(file, data, answered)


def data_files(resolved: ResolvedConfig) -> list[Path]:
    """Return the data files of a config."""
    data = resolved.config.data
    files = [(data.train, "train"), (data.test, "test"), *((path, "train") for path in data.examples)]
    return [_resolve(path, resolved.folder, split) for path, split in files if isinstance(path, Path)]


def _resolve(path: Path, folder: Path, split: str) -> Path:
    """Return a path relative to the config's folder or, if it is not there, to the working directory.

    For the folder of a stage, return the file of its examples; for a data set of the hub, the file that it
    was fetched into, of ``split`` if its address names none.
    """
    if is_hub(path):
        return fetch_rows(str(path), split)
    in_folder = folder / path
    target = in_folder if in_folder.exists() or path.is_absolute() else path
    return target / EXAMPLES_FILE if target.is_dir() else target
