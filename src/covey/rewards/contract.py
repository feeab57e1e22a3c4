"""The contract of a reward function in a run: its weight, its gate, its process, and its arguments."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, NamedTuple

from covey.rewards.ends import drawn_ends
from covey.rewards.reading import Reply, ReplyReader, Tagged
from covey.types import Completion, Problem
from covey_verify.contract import Place, RewardFunction, writable
from covey_verify.errors import ConfigError
from covey_verify.extract import last_text
from covey_verify.sandbox.process import ProcessSandbox
from covey_verify.sandbox.wire import Attributes
from covey_verify.types import Row, Score

WORKER_PROCESS = "covey.rewards.worker_process"
MAX_REWARD = 1e18
"""Largest weight and largest reward of a completion: its square has to fit into float32."""
MAX_EXTRA = 2_000
"""Number of characters kept of a text that a function logs for a completion."""


@dataclass(frozen=True)
class TrainerState:
    """The value of TRL's argument ``trainer_state``."""

    global_step: int


@dataclass(frozen=True)
class Context:
    """The trainer's data for the calls of one scoring, and the values that these calls log."""

    step: int = 0
    reader: ReplyReader = field(default_factory=ReplyReader)
    rehearsal: bool = False
    """Whether the completions are made up, so that a function that fails is itself at fault."""
    logged: dict[str, list[float]] = field(default_factory=dict)
    extra: dict[str, list[str]] = field(default_factory=dict)
    """Logged texts of one call: column -> a text for each completion."""
    faults: list[str] = field(default_factory=list)
    """Failed attempts at one call, in words: the call was repeated after each of them."""

    def for_call(self) -> Context:
        """Return a context for one call: metrics are shared, logged columns and faults are the call's own."""
        return replace(self, extra={}, faults=[])

    def log_extra(self, column: object, values: Sequence[object]) -> None:
        """Log a value for each completion of the call, as TRL's ``log_extra`` does."""
        self.extra[writable(column)] = [writable(v)[:MAX_EXTRA] for v in values]

    def with_extra(self, scores: list[Score]) -> list[Score]:
        """Return the scores of a call, each with the texts that were logged for its completion."""
        # A column of another length cannot be assigned to completions and is dropped.
        columns = {name: texts for name, texts in self.extra.items() if len(texts) == len(scores)}
        if not columns:
            return scores
        rows = [dict(zip(columns, texts, strict=True)) for texts in zip(*columns.values(), strict=True)]
        return [replace(score, extra=row) for score, row in zip(scores, rows, strict=True)]

    def log_metric(self, name: object, value: float) -> None:
        """Log a value of a metric, as TRL's ``log_metric`` does."""
        self.logged.setdefault(writable(name), []).append(float(value))

    def arguments_for(self, reward: Reward) -> dict[str, object]:
        """Return the arguments of FROM_TRAINER that a function takes, by name or through `**kwargs`."""
        values = {
            "trainer_state": TrainerState(self.step),
            "log_extra": self.log_extra,
            "log_metric": self.log_metric,
        }
        takes_all = reward.takes_all and not reward.ours
        return {name: value for name, value in values.items() if takes_all or name in reward.parameters}


class Gate(NamedTuple):
    """The condition under which a reward counts: another reward's score of the same completion."""

    reward: str
    """Name of the other reward."""
    answer: str
    """The answer that it must have found: "correct" or "incorrect"; "" for any."""

    def is_open(self, score: Score) -> bool:
        """Return whether the other reward's score opens the gate."""
        if score.value is None:
            return False
        if self.answer:
            return (score.value > 0.5) == (self.answer == "correct")
        return score.status in ("ok", "ambiguous")


class Origin(NamedTuple):
    """The place of a reward's function, from which another process can load it."""

    spec: str
    """module.py:function, as in the config."""
    folder: str
    """The folder that the module is relative to."""


@dataclass(frozen=True)
class Reward(RewardFunction):
    """A reward function with its weight and settings."""

    OURS: ClassVar[Sequence[str]] = ("covey", "covey_verify")

    weight: float = 1.0
    gated_by: str | None = None
    """The reward that this one depends on: it counts only where that one finds an answer (`name`), a correct
    answer (`name:correct`) or an incorrect one (`name:incorrect`)."""
    origin: Origin | None = None
    """None for an object from Python and for a built-in function."""
    isolate: Place | None = None
    """The place of its calls, if it is not the declared one."""
    call_sandbox: ProcessSandbox | None = None
    """The sandbox of its calls, if it is called in one."""
    verdict: bool | None = None
    """The config's `verdict`: whether it decides which completions are correct; None if not set."""

    @property
    def place(self) -> Place:
        """The place of its calls: only a function from a file can be called in another process."""
        return "inline" if self.origin is None else self.isolate or self.options.isolate

    @cached_property
    def gate(self) -> Gate | None:
        """The gate that ``gated_by`` names."""
        if self.gated_by is None:
            return None
        reward, _, answer = self.gated_by.partition(":")
        return Gate(reward, answer)

    @property
    def may_be_verdict(self) -> bool:
        """Whether it may be the verdict: by the config, its declaration, or as more than a format."""
        return super().may_be_verdict if self.verdict is None else self.verdict

    def arguments(
        self, problem: Problem, completions: Sequence[Completion], context: Context
    ) -> dict[str, object]:
        """Return the arguments of a call: only arguments that the signature accepts.

        Settings win over columns.
        """
        # Messages that covey made of a text (`data.chat`) reach a user's function as that text again.
        prompt = problem.prompt
        if not isinstance(prompt, str) and problem.asked_in_text and not self.ours:
            prompt = last_text(prompt)
        in_text = isinstance(prompt, str)
        replies = [context.reader.read(problem, c) for c in completions]
        # Built-in rewards look for <think> tags; users' functions get the completion as it was sampled.
        answers = [reply.tagged.text if self.ours else reply.text for reply in replies]
        # TRL's convention: the completions have the form of the prompt, strings or messages.
        texts = [text if in_text else [{"role": "assistant", "content": text}] for text in answers]
        row = Row(problem.id, prompt, problem.columns)
        available = self.offer_arguments(row, texts, [c.text for c in completions])
        if not self.per_sample:
            available["completion_ids"] = [c.tokens.tolist() for c in completions]
        available |= self._made_of(replies, context, available)
        return {**self.choose_arguments(available), **context.arguments_for(self)}

    def _made_of(
        self, replies: Sequence[Reply], context: Context, columns: Container[str]
    ) -> dict[str, object]:
        """Return the arguments that are computed only if the signature asks, as they are costly."""

        def ends(reply: Reply) -> list[int]:
            read = reply.tagged if self.ours else Tagged(reply.text)
            return read.positions(drawn_ends(reply.completion, context.reader.decode))

        makers: dict[str, Callable[[Reply], object]] = {
            "sampled_ids": lambda r: r.completion.tokens[r.completion.drawn_mask].tolist(),
            "token_ends": ends,
            "turns": lambda r: r.tagged_turns if self.ours else r.turns,
            "template_arguments": lambda r: dict(r.problem.template),
            # The function may be called in another process, to which plain data are sent.
            "thought_marks": lambda r: Attributes(**r.problem.thoughts._asdict()),
        }
        state = "environment" if self.per_sample else "environments"
        if state not in columns:  # a run whose completions have environments has no such column
            makers[state] = lambda r: _attributes(r.completion.transcript.environment)
        arguments = dict[str, object]()
        for name, make in makers.items():
            if name in self.parameters:
                values = [make(reply) for reply in replies]
                # A function of one completion gets a value, a function of a group a list.
                arguments[name] = values[0] if self.per_sample else values
        return arguments


def _attributes(environment: Mapping[str, object] | None) -> Attributes | None:
    return None if environment is None else Attributes(**environment)


def verdict_of(rewards: Sequence[Reward]) -> Reward:
    """Return the reward that decides which completions are correct, whatever their order.

    It is the reward declared with `verdict: true`, or the only reward, or the only reward that may be it.
    """
    declared = [r for r in rewards if r.verdict]
    if declared:
        candidates = declared
    elif len(rewards) == 1:
        candidates = list(rewards)
    else:
        candidates = [r for r in rewards if r.may_be_verdict]
    if len(candidates) == 1:
        return candidates[0]
    # The likeliest comes first, because the error shows how to mark the first.
    undecided = sorted(candidates or rewards, key=lambda r: (not r.options.verdict, r.name))
    names = [r.name for r in undecided]
    line = getattr(undecided[0].function, "__covey_name__", names[0])
    why = "each says `verdict: true`." if declared else "which of them says whether an answer is correct?"
    raise ConfigError(
        f"rewards: {', '.join(names)}: {why} Accuracy, filters, the curriculum and the verdict on the run "
        f"follow one reward: mark it, as in `rewards: [{{{line}: {{verdict: true}}}}, ...]`"
        + ("" if declared or len(candidates) < 2 else ", or mark the others with `verdict: false`")
    )
