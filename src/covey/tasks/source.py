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
from covey.tasks.files import absence, given_problems, read_problems
from covey.tasks.generated import problems
from covey.tasks.hub import fetch_rows, is_hub
from covey.types import Problem
from covey_verify.errors import ConfigError, DataError

ROW_SETTINGS = ("prompt", "answer", "columns", "template", "chat", "system", "chat_template_kwargs")
"""Settings of the layout of a file's rows, which a built-in task does not use."""
EXAMPLES = "examples.jsonl"
"""Name of the file with the examples that a stage has made."""
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
    # Examples are the only training data; otherwise the problems' own source is loaded as well.
    alone = data.task is None and data.train is None and bool(rows)
    test = _problems_of(data.test, resolved, "test") if alone and data.test is not None else []
    source = Source([], test[: data.test_size]) if alone else load_problems(resolved)
    learn = partial(examples_of, method=config.method, data=data, most=config.scoring.max_bad_references)
    examples = learn(rows or source.train)
    # A test file of examples is used for evaluation as it is; without one a fraction of the training
    # examples is held out.
    judged = [p for p in source.test if {"chosen", "label", "labels"} & set(p.columns)]
    if judged and config.method != "sft":
        return replace(source, examples=examples, held_out=learn(judged))
    fraction = data.held_out if config.method != "sft" else 0.0
    held_out = _set_apart([e.problem for e in examples], fraction, config.seed)
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
    return Source([], _problems_of(data.test, resolved, "test")[: data.test_size])


def _set_apart(problems: Sequence[Problem], fraction: float, seed: int) -> set[str]:
    """Choose the prompts to hold out; all examples of a prompt are held out, or all are trained on."""
    counts = Counter(map(prompt_key, problems))
    prompts = list(counts)
    # Number of examples that may still be held out; prompts with more are skipped.
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
        problems = _problems_of(path, resolved)
        if number < len(data.examples):
            order = permutation(key(resolved.config.seed, "replay", number), len(problems)).tolist()
            problems = [problems[i] for i in sorted(order[: round(data.replay * len(problems))])]
        yield problems


def load_problems(resolved: ResolvedConfig) -> Source:
    """Read or generate the problems of a config. Raises DataError or ConfigError."""
    data = resolved.config.data
    if data.task is not None and data.train is not None:
        raise ConfigError("data: give either task or train, not both")
    unused = [name for name in ROW_SETTINGS if getattr(data, name) != getattr(Data(), name)]
    if data.task is not None and unused and not data.examples:
        raise ConfigError(
            f"data.{unused[0]}: the built-in task {data.task} has prompts and columns of its own; remove "
            f"{unused[0]}, or use a file (data.train)"
        )
    if data.task is not None and data.task.startswith(gym.PREFIX):
        train = gym.gym_problems(data.task, "train", data.train_size)
        return Source(train, gym.gym_problems(data.task, "test", data.test_size), gym.GYM_REWARDS)
    if data.task is not None:
        if data.task not in TASKS:
            raise ConfigError(f"data.task: {data.task!r} is unknown; known: {', '.join(sorted(TASKS))}")
        task = TASKS[data.task]
        train = problems(task, "train", data.train_size)
        by_step = task.steps if resolved.config.method == "rl" and resolved.algorithm.credit == "step" else ()
        return Source(train, problems(task, "test", data.test_size), (*task.rewards, *by_step))
    if data.train is None:
        raise ConfigError("data: there are no problems; set data.train to a file or data.task to a task")
    test = _problems_of(data.test, resolved, "test") if data.test is not None else []
    return Source(_problems_of(data.train, resolved), test[: data.test_size])


def _problems_of(where: Path | RowsObject, resolved: ResolvedConfig, split: str = "train") -> list[Problem]:
    data = resolved.config.data
    method = resolved.config.method
    # Held-out conversations are answered; only pairs and judged answers are compared as they are.
    answered = not METHODS[method].learns_from or (split == "test" and method == "sft")
    if isinstance(where, RowsObject):
        return given_problems(where, data, answered)
    file = _resolve(where, resolved.folder, split)
    if not file.is_file():
        raise DataError(absence(file, of_config=True))
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
    beside = folder / path
    target = beside if beside.exists() or path.is_absolute() else path
    return target / EXAMPLES if target.is_dir() else target
