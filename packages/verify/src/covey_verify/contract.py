"""The contract of a reward function: its signatures, its arguments and its return values.

    def reward(completions, **columns) -> list[float | None]      # TRL's: a group at a time
    def reward(completion, **columns) -> float | None             # one completion
    def compute_score(data_source, solution_str, ground_truth, extra_info) -> float      # verl's

It may be sync or async. Columns of the dataset are passed by name, if the signature accepts them.
Instead of a number each may return a bool, StepRewards or a Score.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import math
import numbers
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar, Literal, TypeVar, get_args

from covey_verify.errors import RewardError
from covey_verify.extract import TextOrMessages
from covey_verify.sandbox.base import Outcome
from covey_verify.sandbox.client import verifier_server
from covey_verify.sandbox.confine import Limits
from covey_verify.types import Positive, Row, Score, Status, StepRewards

FROM_TRAINER = {"trainer_state", "log_extra", "log_metric"}
"""Arguments that only a trainer can provide."""
# Arguments with a value for each completion of the group, and arguments with a value for one completion.
GROUP_ARGUMENTS = {
    "prompts", "completions", "completion_ids", "sampled_ids", "turns", "environments", "thought_marks",
    "template_arguments", *FROM_TRAINER,
}  # fmt: skip
SAMPLE_ARGUMENTS = {
    "prompt", "completion", "token_ends", "environment", "solution_str", "ground_truth", "data_source",
    "extra_info",
}  # fmt: skip
PROVIDED = {*GROUP_ARGUMENTS, *SAMPLE_ARGUMENTS, "sandbox", "model_cache"}
"""Arguments that every reward may ask for; all others are columns or have defaults."""
ISOLATED = "covey_verify.isolated"
MARK = "__covey_reward__"
"""Attribute of a function that holds its declaration (Options)."""
LIMITS = Limits(wall=6.0, cpu=2, memory=1 << 30)
"""Limits of a verifier in a subprocess. It only computes, so its processor time decides."""
TAKEN = {"mean", "std", "agreement", *get_args(Status)}
"""Names of numbers logged for every reward (reward/NAME/mean), closed to a function's own metrics."""
FULL = 1.0 - 1e-9
"""The least score that counts as paid in full."""
Place = Literal["worker", "process", "sandbox", "inline"]
"""The place where a user's function is called."""
F = TypeVar("F", bound=Callable[..., object])


@dataclass(frozen=True)
class Options:
    """A function's declaration with ``@reward``."""

    weight: float = 1.0
    columns: tuple[str, ...] = ()
    """Columns that it needs besides the parameters of its signature."""
    timeout: Positive | None = None
    """Seconds that a call may take; None: the config's value."""
    isolate: Place = "worker"
    """`worker`: in a process that keeps its state and is killed if a call hangs. `process`: each call in a
    process of its own, with limits on time and memory. `sandbox`: the same, without files, network and other
    processes. `inline`: in the trainer itself."""
    requires: tuple[str, ...] = ()
    """Modules that have to be installed."""
    concurrent: bool = False
    """Whether several threads may call it at once; otherwise its calls queue up."""
    format_only: bool = False
    """Whether it judges the format only, so that well-formed nonsense may be paid; `covey stress` asks."""
    verdict: bool | None = None
    """Whether it decides if an answer is correct; None: unknown, but False if it judges the format only."""
    check_references: Callable[..., list[str | None]] | None = None
    """(rows, **settings) -> for each row the fault of its reference answer, or None; checked first."""
    example: Callable[..., str | None] | None = None
    """(row, **settings) -> a completion that must be paid in full, for tests of the reward itself."""
    counterexample: Callable[..., str | None] | None = None
    """(row, **settings) -> a completion that must be paid nothing. Both are tried in every step."""
    unavailable: Callable[..., str] | None = None
    """(**settings) -> why its server does not answer now, or ""; for `covey stress`."""


def reward(**options: Any) -> Callable[[F], F]:
    """Declare weight, columns, timeout, isolate or requires of a reward function. Optional."""

    def mark(function: F) -> F:
        setattr(function, MARK, Options(**options))
        return function

    return mark


@dataclass(frozen=True)
class RewardFunction:
    """A reward function with its settings, and the rules for its arguments and return values."""

    OURS: ClassVar[Sequence[str]] = ("covey_verify",)
    """Packages whose functions are built in."""

    name: str
    function: Callable[..., Any]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ours(self) -> bool:
        """Whether it is built in."""
        return str(getattr(self.function, "__module__", "")).partition(".")[0] in self.OURS

    @property
    def file(self) -> str:
        """The user's file, "" if there is none."""
        module = sys.modules.get(str(getattr(self.function, "__module__", "")))
        return getattr(module, "__file__", None) or ""

    @cached_property
    def options(self) -> Options:
        """The function's declaration."""
        return getattr(self.function, MARK, Options())

    @property
    def plain_settings(self) -> dict[str, object]:
        """The settings of the config, for the function's example and its checks."""
        objects = ("sandbox", "model_cache")
        return {name: value for name, value in self.settings.items() if name not in objects}

    @property
    def may_be_verdict(self) -> bool:
        """Whether it may be the verdict, by its declaration."""
        declared = self.options.verdict
        return not self.options.format_only if declared is None else declared

    @cached_property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters of the function's signature."""
        return inspect.signature(self.function).parameters

    @cached_property
    def set_only(self) -> set[str]:
        """Settings with a default, which no column replaces in a built-in reward."""
        defaults = {n: p.default for n, p in self.parameters.items() if p.kind is p.KEYWORD_ONLY}
        return {n for n, default in defaults.items() if default not in (inspect.Parameter.empty, None, "")}

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
        """Return what keeps it from judging rows with these columns (a column, a module), or None."""
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        required = [n for n, p in self.parameters.items() if p.default is p.empty and p.kind in kinds]
        available = {*PROVIDED, *self.settings, *columns}
        if "answer" not in columns and "ground_truth" not in {*self.settings, *columns}:
            available.discard("ground_truth")  # its value would be the value of ``answer``
        for name in (*required, *self.options.columns):
            if name not in available:
                kind = self.parameters[name].kind if name in self.parameters else None
                or_setting = " or setting" if kind is inspect.Parameter.KEYWORD_ONLY else ""
                return f"needs column{or_setting} {name!r}"
        for module in self.options.requires:
            if importlib.util.find_spec(module) is None:
                return f"needs the module {module!r}, which is not installed"
        return None

    @property
    def takes_all(self) -> bool:
        """Whether its signature ends in `**kwargs`."""
        return any(p.kind is p.VAR_KEYWORD for p in self.parameters.values())

    def offer_arguments(
        self, row: Row, completions: Sequence[TextOrMessages], solutions: Sequence[str]
    ) -> dict[str, object]:
        """Return a row's data and completions under the names of TRL and verl, for a call to choose from.

        ``solutions``: the completions as plain text, with the model's own marks.
        """
        columns = row.columns
        count = len(completions)
        if self.per_sample:
            return {
                "ground_truth": columns.get("answer"),
                "data_source": row.id.partition("/")[0],
                "extra_info": {},
                **columns,
                # Last, so that a column named completion (the worked answer) cannot replace the sampled one.
                "prompt": row.prompt,
                "completion": completions[0],
                "solution_str": solutions[0],
            }
        return {
            **{name: [value] * count for name, value in columns.items()},
            "prompts": [row.prompt] * count,
            "completions": list(completions),
        }

    def choose_arguments(self, offered: Mapping[str, object]) -> dict[str, object]:
        """Return the offered arguments that the signature accepts, and the settings, which win."""
        arguments = dict(offered)
        if self.ours:  # a column may share its name with a setting (points, percent) by chance
            arguments = {n: v for n, v in arguments.items() if n not in self.set_only}
        if isinstance(self.function, partial):  # nor may a column replace an argument that the user has bound
            arguments = {n: v for n, v in arguments.items() if n not in self.function.keywords}
        if not self.takes_all:
            arguments = {n: v for n, v in arguments.items() if n in self.parameters}
        arguments = {**arguments, **self.settings}
        # A user's function may change its arguments, but not the data set.
        return arguments if self.ours else own_copy(arguments)

    def scores(self, row: str, returned: Any, count: int) -> list[Score]:
        """Return a call's results as one Score per completion; ``row`` is the row's name.

        Raises RewardError.
        """
        values = [returned]
        if not self.per_sample:
            if getattr(returned, "ndim", 0) == 1:  # of numpy or torch
                returned = returned.tolist()
            if not isinstance(returned, Sequence) or isinstance(returned, str):
                raise self.error_in_row(
                    row, f"returned {_format_value(returned)}, not a list with one number per completion"
                )
            if len(returned) != count:
                raise self.error_in_row(row, f"returned {len(returned)} values for {count} completions")
            values = list(returned)
        return [self._score(row, value) for value in values]

    def _score(self, row: str, value: Any) -> Score:
        if isinstance(value, Mapping) and "score" in value:  # verl's
            value = value["score"]
        score = value if isinstance(value, Score) else Score(value)
        if score.status not in get_args(Status):
            raise self.error_in_row(
                row,
                f"returned the status {score.status!r}, which is not one of {', '.join(get_args(Status))}",
            )
        result: object = score.value
        try:
            if isinstance(result, StepRewards):
                score = Score(result.total, steps=_spans(result))
            status = "not_applicable" if score.value is None and score.status == "ok" else score.status
            return Score(
                self._number(score.value),
                status,
                None if score.extracted is None else writable(score.extracted),
                {_metric_name(name): float(number) for name, number in score.metrics.items()},
                None if score.steps is None else tuple(map(_step, score.steps)),
                writable(score.detail),
            )
        except (TypeError, ValueError, OverflowError, AttributeError) as error:
            raise self.error_in_row(row, f"returned {error}") from None

    def _number(self, value: object) -> float | None:
        if value is None:
            return None
        # A scalar of numpy or torch.
        if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
            value = value.item()
        # An integer too large for a float raises OverflowError here (and ValueError in str()).
        with contextlib.suppress(OverflowError):
            if isinstance(value, numbers.Real) and math.isfinite(value):
                return float(value)
        raise ValueError(f"{_format_value(value)}, not a finite number or None")

    def error_in_row(self, row: str, fault: str) -> RewardError:
        """Return an error that names the function and the row."""
        return RewardError(f"reward {self.name} on problem {row}: {fault}")


def canaries(function: RewardFunction, columns: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield (`correct` or `incorrect`, completion) for a declared example or counterexample."""
    makers = {"correct": function.options.example, "incorrect": function.options.counterexample}
    for kind, make in makers.items():
        text = make(columns, **function.plain_settings) if make is not None else None
        if text is not None:
            yield kind, text


def in_subprocess(name: str, *arguments: object) -> Outcome:
    """Call a function of ``isolated`` in a process that can be killed."""
    return verifier_server(ISOLATED).call(f"{ISOLATED}:{name}", *arguments, limits=LIMITS)


def score_without_result(result: Outcome, extracted: str | None = None) -> Score:
    """Return the score of a completion whose verifier ended without a result in its subprocess."""
    return Score(None if result.kind == "lost" else 0.0, fault(result), extracted, detail=result.text)


def fault(result: Outcome) -> Status:
    """Return the status for the end of a built-in verifier's subprocess, which the text has caused."""
    statuses: dict[str, Status] = {"timeout": "timeout", "crashed": "crashed", "lost": "infra_error"}
    if result.text.startswith(("MemoryError", "RecursionError")) or result.kind == "flood":
        return "too_large"
    return statuses.get(result.kind, "unparsable")


def own_copy(value: Any) -> Any:
    """Return a value with new containers, so that changes to it do not affect the original."""
    kind = type(value)
    if kind is dict:
        return {k: own_copy(v) for k, v in value.items()}
    if kind in (list, set, tuple):
        return kind(map(own_copy, value))
    return value.copy() if hasattr(value, "ndim") and hasattr(value, "copy") else value


def writable(value: object) -> str:
    r"""Return a user's value as a text. Lone surrogates, which no file can hold, are escaped.

    >>> print(writable("a\ud83d"))
    a\ud83d
    """
    return str(value).encode(errors="backslashreplace").decode()


def _metric_name(name: object) -> str:
    if name in TAKEN:
        raise ValueError(f"a metric with the name {name!r}, which the log uses for every reward; rename it")
    return writable(name)


def _step(step: Sequence[float]) -> tuple[int, int, float]:
    first, after, value = step
    if not math.isfinite(value):
        raise ValueError(f"a step with {_format_value(value)}, not a finite number")
    return int(first), int(after), float(value)


def _format_value(value: object) -> str:
    try:
        text = str(value)[:60]
    except Exception:  # an integer of 4,300 digits or more
        text = "that cannot be written out"
    return f"{type(value).__name__} {text!r}"


def _spans(rewards: StepRewards) -> tuple[tuple[int, int, float], ...]:
    """Return (first token, token after the last, value) of each step. Raises ValueError for invalid ends."""
    ends = [int(end) for end in rewards.ends]
    if len(ends) != len(rewards.values):
        raise ValueError(
            f"StepRewards with {len(rewards.values)} values but {len(ends)} ends; each step needs both"
        )
    wrong = [i for i, end in enumerate(ends) if end <= (ends[i - 1] if i else -1)]
    if wrong:
        raise ValueError(
            f"StepRewards whose ends {ends[:20]} do not increase at position {wrong[0] + 1}; they must be "
            "the indices of the last token of each step, from 0 up"
        )
    after = [end + 1 for end in ends]
    # Each step begins where the step before it ends.
    return tuple(zip((0, *after), after, rewards.values, strict=False))
