"""A reward function in a run: its weight, its gate, where it is judged, and what it gets of a completion."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from covey.rewards.ends import drawn_ends
from covey.rewards.reading import CallReader, Said, Tagged, said_in_tags, turns_of
from covey.types import Completion, Problem
from covey_verify.contract import FROM_TRAINER, RewardFunction, writable
from covey_verify.errors import ConfigError
from covey_verify.sandbox.wire import Attributes
from covey_verify.types import Row, Score

SERVING = "covey.rewards.serving"
LARGEST_REWARD = 1e18
"""Of a weight or a completion's reward: an estimator squares it, and the trainer computes in float32."""
LONGEST_EXTRA = 2_000
"""Characters of a text that a function logs of a completion."""


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
        self.extra[writable(column)] = [writable(v)[:LONGEST_EXTRA] for v in values]

    def with_extra(self, scores: list[Score]) -> list[Score]:
        """The scores of a call with what it logged of each completion."""
        whole = {column: own for column, own in self.extra.items() if len(own) == len(scores)}
        return [
            replace(score, extra={column: own[i] for column, own in whole.items()}) if whole else score
            for i, score in enumerate(scores)
        ]

    def log_metric(self, name: object, value: float) -> None:
        """TRL's."""
        self.logged.setdefault(writable(name), []).append(float(value))

    def provided(self, reward: Reward) -> dict[str, object]:
        """The arguments among FROM_TRAINER that a function asks for, by name or as one of its `**kwargs`."""
        values = (TrainerState(self.step), self.log_extra, self.log_metric)
        every = reward.takes_all and not reward.ours
        return {n: v for n, v in zip(FROM_TRAINER, values, strict=True) if every or n in reward.parameters}


@dataclass(frozen=True)
class Reward(RewardFunction):
    """A reward function with its weight and settings."""

    OURS: ClassVar[Sequence[str]] = ("covey", "covey_verify")

    weight: float = 1.0
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
    def place(self) -> Literal["worker", "process", "inline"]:
        """Where it is judged: only a function of a file can be called in another process."""
        return "inline" if self.home is None else self.isolate or self.options.isolate

    @property
    def may_be_verdict(self) -> bool:
        """Whether its name and declarations leave it possible that it says what is correct."""
        declared = self.options.verdict if self.verdict is None else self.verdict
        return not self.options.format_only if declared is None else declared

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
        row = Row(problem.id, asked, problem.columns)
        available = self.offered(row, texts, [c.text for c in completions])
        if not self.per_sample:
            available["completion_ids"] = [c.tokens.tolist() for c in completions]
        available |= self._made_of(problem, completions, read, context, available)
        return {**self.accepted(available), **context.provided(self)}

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
