"""What a reward function is: how it may be written, what it may ask for and what it may return.

    def reward(completions, **columns) -> list[float | None]      # TRL's: a group at a time
    def reward(completion, **columns) -> float | None             # one completion
    def compute_score(data_source, solution_str, ground_truth, extra_info) -> float      # verl's

Sync or async. Columns of the dataset arrive by name, only those the signature accepts. Instead of a
number each may give a bool, StepRewards or a Score.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import math
import numbers
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeVar, get_args

import numpy as np

from covey.errors import ConfigError, RewardError
from covey.rewards.ends import drawn_ends, spans_of
from covey.rewards.reading import CallReader, Said, Tagged, said_in_tags, turns_of
from covey.sandbox.base import Outcome
from covey.sandbox.client import verifier_server
from covey.sandbox.confine import Limits
from covey.sandbox.wire import Attributes
from covey.types import Completion, Positive, Problem, Score, Status, StepRewards

FROM_TRAINER = ("trainer_state", "log_extra", "log_metric")
GROUP_ARGUMENTS = {
    "prompts", "completions", "completion_ids", "sampled_ids", "turns", "environments", "thought_marks",
    *FROM_TRAINER,
}  # fmt: skip
SAMPLE_ARGUMENTS = {
    "prompt", "completion", "token_ends", "environment", "solution_str", "ground_truth", "data_source",
    "extra_info",
}  # fmt: skip
PROVIDED = {*GROUP_ARGUMENTS, *SAMPLE_ARGUMENTS, "sandbox", "config_folder"}
"""Arguments every reward may ask for; all others are columns or have defaults."""
ISOLATED = "covey.rewards.isolated"
SERVING = "covey.rewards.serving"
MARK = "__covey_reward__"
"""Attribute of a function that holds what it declares."""
LIMITS = Limits(wall=4.0, cpu=2, memory=1 << 30)
"""Of a verifier in a subprocess."""
TAKEN = {"mean", "std", "agreement", *get_args(Status)}
"""What the log says of every reward, as reward/NAME/mean: no number of a function's own is called so."""
LARGEST_REWARD = 1e18
"""Of a weight or a completion's reward: an estimator squares it, and the trainer computes in float32."""
LONGEST_EXTRA = 2_000
"""Characters of a text that a function logs of a completion."""
FULL = 1.0 - 1e-9
"""A score from here on pays in full."""
F = TypeVar("F", bound=Callable[..., object])


@dataclass(frozen=True)
class Options:
    """What a function declares about itself with ``@reward``."""

    weight: float = 1.0
    columns: tuple[str, ...] = ()
    """Columns it needs besides those in its signature."""
    timeout: Positive | None = None
    """Seconds a call may take; None: the config's."""
    isolate: Literal["worker", "process", "inline"] = "worker"
    """`worker`: in a process that keeps its state and is killed if a call hangs. `process`:
    each call in a process of its own, with limits on time and memory. `inline`: in the trainer itself."""
    requires: tuple[str, ...] = ()
    """Modules that have to be installed."""
    concurrent: bool = False
    """Whether several threads may be in it at once; otherwise its calls queue up."""
    format_only: bool = False
    """Whether it judges the format only, so that well-formed nonsense may be paid; `covey stress` asks."""
    verdict: bool | None = None
    """Whether it says if an answer is correct; None: unknown, but not if it judges the format only."""
    check_references: Callable[..., list[str | None]] | None = None
    """(rows, **settings) -> for each row what is wrong with its reference answer, found before training."""
    example: Callable[..., str | None] | None = None
    """(row, **settings) -> a completion that must be paid in full, for tests of the reward itself."""
    counterexample: Callable[..., str | None] | None = None
    """(row, **settings) -> one that must be paid nothing. Both are asked about in every step."""
    unavailable: Callable[..., str] | None = None
    """(**settings) -> why whom it asks does not answer now, or nothing; `covey stress` wants to know."""


@dataclass(frozen=True)
class TrainerState:
    """What a function that asks for TRL's ``trainer_state`` gets."""

    global_step: int


@dataclass(frozen=True)
class Context:
    """What the calls of one scoring get from the trainer, and what they log."""

    step: int = 0
    decode: Callable[[Sequence[int]], str] = lambda _: ""
    calls: CallReader = lambda *_: ()
    logged: dict[str, list[float]] = field(default_factory=dict)
    extra: dict[str, list[str]] = field(default_factory=dict)
    """Column -> a text for each completion of one call."""

    def of_call(self) -> Context:
        """The same for one call, whose columns are its own."""
        return replace(self, extra={})

    def log_extra(self, column: object, values: Sequence[object]) -> None:
        """TRL's: a value for each completion of the call, for people."""
        self.extra[_writable(column)] = [_writable(v)[:LONGEST_EXTRA] for v in values]

    def with_extra(self, scores: list[Score]) -> list[Score]:
        """The scores of a call with what it logged of each completion."""
        whole = {column: own for column, own in self.extra.items() if len(own) == len(scores)}
        return [
            replace(score, extra={column: own[i] for column, own in whole.items()}) if whole else score
            for i, score in enumerate(scores)
        ]

    def log_metric(self, name: object, value: float) -> None:
        """TRL's."""
        self.logged.setdefault(_writable(name), []).append(float(value))

    def provided(self, reward: Reward) -> dict[str, object]:
        """The arguments among FROM_TRAINER that a function asks for, by name or as one of its `**kwargs`."""
        values = (TrainerState(self.step), self.log_extra, self.log_metric)
        every = reward.takes_all and not reward.ours
        return {n: v for n, v in zip(FROM_TRAINER, values, strict=True) if every or n in reward.parameters}


def reward(**options: Any) -> Callable[[F], F]:
    """Declare weight, columns, timeout, isolate or requires of a reward function. Optional."""

    def mark(function: F) -> F:
        setattr(function, MARK, Options(**options))
        return function

    return mark


@dataclass(frozen=True)
class Reward:
    """A reward function with its weight and settings."""

    name: str
    function: Callable[..., Any]
    weight: float = 1.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    gated_by: str | None = None
    """Name of the reward that has to find an answer (`name`), a correct one (`name:correct`) or an incorrect
    one (`name:incorrect`) for this one to count."""
    home: tuple[str, str] | None = None
    """How the config names it, and the folder from which that is found; None of an object from Python."""
    isolate: Literal["worker", "process", "inline"] | None = None
    """Where it is judged, instead of where the function declares."""
    verdict: bool | None = None
    """Whether it decides which completions are correct, as the config says; None: the config says nothing."""

    @property
    def ours(self) -> bool:
        """Whether it is built in."""
        return str(getattr(self.function, "__module__", "")).partition(".")[0] == "covey"

    @property
    def file(self) -> str:
        """The user's file."""
        module = sys.modules.get(str(getattr(self.function, "__module__", "")))
        return getattr(module, "__file__", None) or ""

    @property
    def place(self) -> Literal["worker", "process", "inline"]:
        """Where it is judged: only a function of a file can be called in another process."""
        return "inline" if self.home is None else self.isolate or self.options.isolate

    @cached_property
    def options(self) -> Options:
        """What the function declares."""
        return getattr(self.function, MARK, Options())

    @property
    def plain_settings(self) -> dict[str, object]:
        """Its settings without the sandbox: those of its example and its checks."""
        return {name: value for name, value in self.settings.items() if name != "sandbox"}

    @property
    def may_be_verdict(self) -> bool:
        """Whether its name and declarations leave it possible that it says what is correct."""
        declared = self.options.verdict if self.verdict is None else self.verdict
        return not self.options.format_only if declared is None else declared

    @cached_property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """Of the function's signature."""
        return inspect.signature(self.function).parameters

    @cached_property
    def set_only(self) -> set[str]:
        """Settings with a value of their own, which of a built-in reward no column replaces."""
        own = {n: p.default for n, p in self.parameters.items() if p.kind is p.KEYWORD_ONLY}
        return {n for n, default in own.items() if default not in (inspect.Parameter.empty, None, "")}

    @cached_property
    def per_sample(self) -> bool:
        """Whether it is called with one completion at a time."""
        return bool({"completion", "solution_str"} & set(self.parameters))

    @property
    def is_async(self) -> bool:
        """Whether calls have to be awaited."""
        call = getattr(self.function, "__call__", None)  # noqa: B004 - an object's, to see if it is async
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(call)

    def problem_with(self, columns: Sequence[str]) -> str | None:
        """Why it cannot judge rows with these columns: one is missing, or a module is."""
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        required = [n for n, p in self.parameters.items() if p.default is p.empty and p.kind in kinds]
        known = {*PROVIDED, *self.settings, *columns}
        if "answer" not in columns:  # which is what ``ground_truth`` is where no column is called so
            known -= {"ground_truth"} - {*self.settings, *columns}
        for name in (*required, *self.options.columns):
            if name not in known:
                kind = self.parameters[name].kind if name in self.parameters else None
                either = " or setting" if kind is inspect.Parameter.KEYWORD_ONLY else ""
                return f"needs column{either} {name!r}"
        for module in self.options.requires:
            if importlib.util.find_spec(module) is None:
                return f"needs the module {module!r}, which is not installed"
        return None

    @property
    def takes_all(self) -> bool:
        """Whether its signature ends in `**kwargs`."""
        return any(p.kind is p.VAR_KEYWORD for p in self.parameters.values())

    def arguments(
        self, problem: Problem, completions: Sequence[Completion], context: Context
    ) -> dict[str, object]:
        """What a call gets: only what the signature accepts. Settings win over columns."""
        asked = problem.prompt
        if not isinstance(asked, str) and problem.asked_in_text and not self.ours:
            asked = str(asked[-1]["content"])
        in_text = isinstance(asked, str)
        read = [
            said_in_tags(c, problem.thoughts, context.decode) if self.ours else Said(Tagged(c.text))
            for c in completions
        ]
        said = [r.whole.text for r in read]
        texts = [text if in_text else [{"role": "assistant", "content": text}] for text in said]
        if self.per_sample:
            row = problem.columns
            available = {
                "ground_truth": row.get("answer"),
                "data_source": problem.id.partition("/")[0],
                "extra_info": {},
                **row,
                # A column named completion (the worked answer) must not stand in for what was sampled.
                "prompt": asked,
                "completion": texts[0],
                "solution_str": completions[0].text,
            }
        else:
            available = {
                **{k: [v] * len(texts) for k, v in problem.columns.items()},
                "prompts": [asked] * len(texts),
                "completions": texts,
                "completion_ids": [c.tokens.tolist() for c in completions],
            }
        available |= self._made_of(problem, completions, read, context, available)
        if self.ours:  # a column that happens to be called points, or percent, is no setting
            available = {n: v for n, v in available.items() if n not in self.set_only}
        if not self.takes_all:
            available = {n: v for n, v in available.items() if n in self.parameters}
        given = {**available, **self.settings}
        return {**(given if self.ours else own_copy(given)), **context.provided(self)}

    def _made_of(
        self,
        problem: Problem,
        completions: Sequence[Completion],
        read: Sequence[Said],
        context: Context,
        columns: Container[str],
    ) -> dict[str, object]:
        """What is made of each completion only where the signature asks for it."""
        made: dict[str, Callable[[Completion, Said], object]] = {
            "sampled_ids": lambda c, _: c.tokens[c.drawn].tolist(),
            "token_ends": lambda c, r: r.whole.places(drawn_ends(c, context.decode)),
            "turns": lambda c, r: r.turns or turns_of(c, r.whole.text, problem, context.calls),
            # The function may be called in another process, to which plain data are sent.
            "thought_marks": lambda *_: Attributes(**problem.thoughts._asdict()),
        }
        state = "environment" if self.per_sample else "environments"
        if state not in columns:  # a run whose completions have environments has no such column
            made[state] = lambda c, _: None if c.environment is None else Attributes(**c.environment)
        pairs = list(zip(completions, read, strict=True))
        asked = {n: [make(*pair) for pair in pairs] for n, make in made.items() if n in self.parameters}
        return {n: found[0] if self.per_sample else found for n, found in asked.items()}

    def scores(self, problem: Problem, returned: Any, count: int) -> list[Score]:
        """What a call returned, as one Score per completion. Raises RewardError."""
        values = [returned]
        if not self.per_sample:
            if getattr(returned, "ndim", 0) == 1:  # of numpy or torch
                returned = returned.tolist()
            if not isinstance(returned, Sequence) or isinstance(returned, str):
                raise self.broken(
                    problem, f"returned {_shown(returned)}; a list with one number per completion is expected"
                )
            if len(returned) != count:
                raise self.broken(problem, f"returned {len(returned)} values for {count} completions")
            values = list(returned)
        return [self._score(problem, value) for value in values]

    def _score(self, problem: Problem, value: Any) -> Score:
        if isinstance(value, Mapping) and "score" in value:  # verl's
            value = value["score"]
        score = value if isinstance(value, Score) else Score(value)
        if score.status not in get_args(Status):
            raise self.broken(
                problem, f"returned the status {score.status!r}; there are {', '.join(get_args(Status))}"
            )
        given: object = score.value
        try:
            if isinstance(given, StepRewards):
                score = Score(given.total, steps=spans_of(given))
            return Score(
                self._number(score.value),
                "not_applicable" if score.value is None and score.status == "ok" else score.status,
                None if score.extracted is None else _writable(score.extracted),
                {_measured(name): float(value) for name, value in score.metrics.items()},
                None if score.steps is None else tuple(map(_step, score.steps)),
                _writable(score.detail),
            )
        except (TypeError, ValueError, OverflowError, AttributeError) as error:
            raise self.broken(problem, f"returned {error}") from None

    def _number(self, value: object) -> float | None:
        if value is None:
            return None
        if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
            value = value.item()
        # A number too large for a float raises OverflowError here and in str() ValueError.
        with contextlib.suppress(OverflowError):
            if isinstance(value, numbers.Real) and math.isfinite(value):
                return float(value)
        raise ValueError(f"{_shown(value)}; a finite number or None is expected")

    def broken(self, problem: Problem, what: str) -> RewardError:
        """An error that names the function and the problem."""
        return RewardError(f"reward {self.name} on problem {problem.id}: {what}")


def in_subprocess(name: str, *arguments: object) -> Outcome:
    """Call one of ``isolated``'s functions in a process that can be killed."""
    return verifier_server(ISOLATED).call(f"{ISOLATED}:{name}", *arguments, limits=LIMITS)


def unfinished(result: Outcome, extracted: str | None = None) -> Score:
    """What a completion gets whose verifier's subprocess came to no result."""
    return Score(None if result.kind == "lost" else 0.0, fault(result), extracted, detail=result.text)


def fault(result: Outcome) -> Status:
    """What a subprocess's end means for a verifier of ours: what it stumbles over is the text."""
    statuses: dict[str, Status] = {"timeout": "timeout", "crashed": "crashed", "lost": "infra_error"}
    if result.text.startswith(("MemoryError", "RecursionError")) or result.kind == "flood":
        return "too_large"
    return statuses.get(result.kind, "unparsable")


def own_copy(value: Any) -> Any:
    """A value whose containers are new, so that nobody else sees what is done to it."""
    kind = type(value)
    if kind is dict:
        return {k: own_copy(v) for k, v in value.items()}
    if kind in (list, set, tuple):
        return kind(map(own_copy, value))
    return value.copy() if kind is np.ndarray else value


def _writable(value: object) -> str:
    r"""What a user's value is called, with half a surrogate pair, which no file takes, spelled out.

    >>> print(_writable("a\ud83d"))
    a\ud83d
    """
    return str(value).encode(errors="backslashreplace").decode()


def _measured(name: object) -> str:
    if name in TAKEN:
        raise ValueError(f"a metric called {name!r}, which the log has of every reward already; rename it")
    return _writable(name)


def _step(step: Sequence[float]) -> tuple[int, int, float]:
    first, after, value = step
    if not math.isfinite(value):
        raise ValueError(f"a step with {_shown(value)}; finite numbers are expected")
    return int(first), int(after), float(value)


def _shown(value: object) -> str:
    try:
        text = str(value)[:60]
    except Exception:  # of an integer of 4,300 digits and more
        text = "that cannot be written out"
    return f"{type(value).__name__} {text!r}"


def verdict_of(rewards: Sequence[Reward]) -> Reward:
    """The reward that decides which completions are correct, whatever their order.

    The one declared with `verdict: true`, a single reward, or the only one that may be it.
    """
    declared = [r for r in rewards if r.verdict]
    found = declared or (list(rewards) if len(rewards) == 1 else [r for r in rewards if r.may_be_verdict])
    if len(found) == 1:
        return found[0]
    undecided = sorted(found or rewards, key=lambda r: (not r.options.verdict, r.name))
    names = [r.name for r in undecided]
    line = getattr(undecided[0].function, "__covey_name__", names[0])
    why = "each says `verdict: true`." if declared else "which of them says whether an answer is correct?"
    raise ConfigError(
        f"rewards: {', '.join(names)}: {why} Accuracy, filters, the curriculum and the verdict on the run "
        f"follow one reward: mark it, as in `rewards: [{{{line}: {{verdict: true}}}}, ...]`"
        + ("" if declared or len(found) < 2 else ", or mark the others with `verdict: false`")
    )
