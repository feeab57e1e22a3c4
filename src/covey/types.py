"""The shapes that flow through covey: Problem -> Completion -> Group. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from covey_verify.types import Messages, Score, StepRewards

VERSION = "0.1.0"

Credit = Literal["completion", "component", "step", "token"]


class Thoughts(NamedTuple):
    """How a model's chat template marks its thoughts, and whether a prompt has opened some."""

    open: str = "<think>"
    close: str = "</think>"
    answer: tuple[str, ...] = ()
    """What it writes before an answer, of templates that mark these too, as gpt-oss's channels."""
    begun: bool = False
    """Whether the prompt ends within thoughts, so that the model begins inside of them."""


TAGS = Thoughts()
"""As most models mark them; none are open."""


@dataclass(frozen=True)
class AnswerTokens:
    """An answer as it was sampled.

    >>> AnswerTokens((5, 8, 9, 6), (True, False, False, True)).inserted
    [[1, 3]]
    """

    ids: tuple[int, ...]
    """(T,), with the end where it was drawn."""
    drawn: tuple[bool, ...]
    """(T,): whether the model drew the token; a tool said the others."""

    @property
    def inserted(self) -> list[list[int]]:
        """Where the others are: [first, one after the last] of each stretch."""
        edges = np.flatnonzero(np.diff(np.array((True, *self.drawn, True)).astype(int)))
        return [list(map(int, span)) for span in edges.reshape(-1, 2)]


@dataclass(frozen=True)
class SampledTokens:
    """A row that an earlier stage has sampled, as token ids: these are trained, whatever `data` says."""

    tokenizer: str
    """Hash of the vocabulary that the ids are of."""
    prompt: tuple[int, ...]
    """(P,): the prompt as the model read it."""
    answers: Mapping[str, AnswerTokens]
    """Column -> what was sampled."""


@dataclass(frozen=True)
class Problem:
    """One task instance: what the model sees and what the rewards need to judge it.

    >>> Problem("sums/train/7", "2+3=", {"answer": "5"}).columns["answer"]
    '5'
    """

    id: str
    """Unique and stable in its stream; part of the key of every random draw made for it."""
    prompt: str | Messages
    """Plain text, or chat messages that go through the model's template."""
    columns: Mapping[str, object] = field(default_factory=dict)
    """Every other field of the row, handed to the reward functions by name."""
    template: Mapping[str, object] = field(default_factory=dict)
    """What the chat template gets besides the messages: `tools`, `documents`, `enable_thinking`, ..."""
    asked_in_text: bool = False
    """Whether the messages are made of a text, by `data.chat` or `data.system`: its rewards get texts."""
    sampled: SampledTokens | None = None
    """Its tokens, where a stage of covey has sampled the row; None where its texts have to be encoded."""
    thoughts: Thoughts = TAGS
    """How its model marks thoughts, and whether the prompt opens them; known once it is encoded."""

    def ends_with(self, text: str) -> bool:
        """Whether the last thing that the model is told ends so."""
        last = self.prompt if isinstance(self.prompt, str) else self.prompt[-1]["content"]
        return str(last).endswith(text)

    @property
    def chat(self) -> bool:
        """Whether its prompt is messages, and so an answer a message."""
        return not isinstance(self.prompt, str)


NO_PROBLEM = Problem("", "")
"""Where none is needed: of a bare prompt, and on a group's way to processes that have the problem."""


@dataclass(frozen=True)
class SamplingMask:
    """The tokens that top_p and top_k left to be drawn, at each of T places.

    >>> mask = SamplingMask.of([np.array([4, 7]), np.array([2])])
    >>> mask.ids.tolist(), mask.ends.tolist()
    ([4, 7, 2], [2, 3])
    """

    ids: np.ndarray
    """(K,) int32: the ids kept at one place after those of the place before, ascending."""
    ends: np.ndarray
    """(T,) int64: where the ids of each place end."""

    @classmethod
    def of(cls, kept: Sequence[np.ndarray]) -> SamplingMask:
        """From the ids kept at each place."""
        empty = np.zeros(0, np.int32)
        ends = np.cumsum([len(ids) for ids in kept], dtype=np.int64)
        return cls(np.concatenate([empty, *kept]).astype(np.int32), ends)

    @classmethod
    def join(cls, masks: Sequence[SamplingMask]) -> SamplingMask:
        """The places of several completions, one after another.

        >>> one = SamplingMask.of([np.array([4, 7])])
        >>> SamplingMask.join([one, one]).ends.tolist()
        [2, 4]
        """
        starts = np.cumsum([0, *(len(m.ids) for m in masks)])
        ends = [m.ends + start for m, start in zip(masks, starts, strict=False)]
        ids = np.concatenate([np.zeros(0, np.int32), *(m.ids for m in masks)])
        return cls(ids, np.concatenate([np.zeros(0, np.int64), *ends]))

    def flat(self, start: int, stop: int, vocabulary: int) -> np.ndarray:
        """Where the ids kept from place ``start`` to ``stop`` are in a flat (stop - start, V) array.

        >>> SamplingMask.of([np.array([4]), np.array([0, 2])]).flat(1, 2, 10).tolist()
        [0, 2]
        """
        ends = self.ends[start:stop]
        first = int(self.ends[start - 1]) if start else 0
        rows = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=first))
        return rows * vocabulary + self.ids[first : first + len(rows)]


@dataclass(frozen=True)
class Completion:
    """What followed a problem's prompt, token by token; never re-tokenized afterwards.

    >>> call = Completion(np.array([5, 8, 9, 6]), np.zeros(4), "", "stop", sampled=np.array([1, 0, 0, 1]) > 0)
    >>> call.length, call.tokens[call.drawn].tolist()
    (2, [5, 6])
    """

    tokens: np.ndarray
    """(T,) int64: the ids, the end-of-sequence token included when it was drawn."""
    logprobs: np.ndarray
    """(T,) float32, nats: of each token under the distribution it was drawn from; 0 of inserted ones."""
    text: str
    """The drawn tokens as they read, special ones too, the end of each turn left out (``models.text``): for
    rewards and for people, not for training."""
    finish: Literal["stop", "length"]
    """``stop``: ended by itself. ``length``: truncated at the token limit."""
    version: int = 0
    """Number of optimizer steps the sampling policy had seen, at the first token."""
    sampling_mask: SamplingMask | None = None
    """What could be drawn at each token, at an inserted one itself; None where everything could."""
    sampled: np.ndarray | None = None
    """(T,) bool: the tokens that the model drew. The others were inserted (a tool's output, a turn of the
    user): the model reads them, and they are neither trained nor counted. None: all were drawn."""
    versions: np.ndarray | None = None
    """(T,) int64: ``version`` of each token, where new weights may come in the middle. None: one for all."""
    turns: tuple[Mapping[str, object], ...] = ()
    """What the model and its tools said in turn, as messages {role, content}, with `tool_calls` where the
    model called; empty where no tool answered."""
    environment: Mapping[str, object] | None = None
    """Attributes of its environment at the end; None where it has none, or that one hung, died or has a
    ``fault``."""
    server: str = ""
    """Address of the server that drew the first token; empty: this process did, or it is not known."""
    fault: str = ""
    """What its environment raised when it was asked for its reward, after calls of the model."""

    def __post_init__(self) -> None:
        own = [x for x in (self.tokens, self.logprobs, self.sampled, self.versions) if x is not None]
        assert len({len(values) for values in own}) == 1, "one value a token"

    @property
    def drawn(self) -> np.ndarray:
        """(T,) bool: ``sampled``, written out."""
        return np.ones(len(self.tokens), bool) if self.sampled is None else self.sampled

    @property
    def token_versions(self) -> np.ndarray:
        """(T,) int64: ``versions``, written out."""
        return np.full(len(self.tokens), self.version) if self.versions is None else self.versions

    @property
    def length(self) -> int:
        """How many tokens were drawn."""
        return len(self.tokens) if self.sampled is None else int(self.sampled.sum())

    @property
    def parts(self) -> list[tuple[bool, np.ndarray]]:
        """Tokens that follow one another and were all drawn, True, or all inserted.

        >>> one = Completion(np.array([5, 8, 9]), np.zeros(3), "", "stop", sampled=np.array([1, 0, 0]) > 0)
        >>> [(drawn, tokens.tolist()) for drawn, tokens in one.parts]
        [(True, [5]), (False, [8, 9])]
        """
        edges = np.flatnonzero(np.diff(self.drawn)) + 1
        found = zip(np.split(self.drawn, edges), np.split(self.tokens, edges), strict=True)
        return [(bool(drawn[0]), tokens) for drawn, tokens in found if len(tokens)]

    def then(self, more: Completion) -> Completion:
        """One completion of this and what follows it, ended as that did.

        >>> said, tool = Completion(np.array([5]), np.zeros(1), "a", "stop"), np.array([8, 9])
        >>> said.then(Completion(tool, np.zeros(2), "", "stop", sampled=tool < 0)).drawn.tolist()
        [True, False, False]
        """
        both, join = (self, more), np.concatenate
        masks = [c.sampling_mask for c in both if c.sampling_mask is not None]
        assert len(masks) != 1, "one sampler drew both"
        return Completion(
            join([c.tokens for c in both]),
            join([c.logprobs for c in both]),
            self.text + more.text,
            more.finish,
            self.version,
            SamplingMask.join(masks) if masks else None,
            join([c.drawn for c in both]) if any(c.sampled is not None for c in both) else None,
            join([c.token_versions for c in both]) if any(c.versions is not None for c in both) else None,
            self.turns + more.turns,
            more.environment,
            self.server,
            more.fault,
        )


@dataclass(frozen=True)
class Group:
    """The scored completions of one problem."""

    problem: Problem
    prompt: np.ndarray
    """(P,) int64: the prompt as the model saw it."""
    completions: tuple[Completion, ...]
    rewards: np.ndarray
    """(G,) float64: weighted sum of the components; NaN where no reward function could judge."""
    components: Mapping[str, np.ndarray] = field(default_factory=dict)
    """name -> (G,) float64: each reward function's own value, unweighted; NaN = not applicable."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """name -> weight of that component in ``rewards``."""
    steps: Mapping[str, tuple[StepRewards, ...]] = field(default_factory=dict)
    """name -> (G,): each completion's rewards by step from the functions that give any, unweighted."""
    scores: Mapping[str, tuple[Score, ...]] = field(default_factory=dict)
    """name -> (G,): everything each reward function said."""
    greedy_reward: float | None = None
    """Reward of the greedy completion, for estimators whose baseline it is."""
    running_mean: np.ndarray | None = None
    """(G,) float64: of earlier rewards, before each completion, for estimators whose baseline it is."""
    segments: tuple[StepRewards, ...] = ()
    """(G,): the value after each segment but the last, for estimators that ask what continuations earn."""
    continued: int = 0
    """Tokens of these continuations."""
    verdict: str = ""
    """Name of the component that says which completions are correct; a single one needs no name."""
    credit: Credit = "completion"
    """What the algorithm gives advantages for, and so what ``rewards`` sums and ``dead`` compares."""

    def __post_init__(self) -> None:
        assert len(self.rewards) == len(self.completions), "one reward a completion"

    @cached_property
    def scorable(self) -> np.ndarray:
        """(G,) bool: which completions got a reward."""
        return ~np.isnan(self.rewards)

    @cached_property
    def correct(self) -> np.ndarray:
        """(G,) bool: the verdict is above one half."""
        names = [self.verdict] if self.verdict else list(self.components)
        assert len(names) < 2, f"which of {names} says what is correct?"
        verdict = self.components[names[0]] if names else self.rewards
        return np.nan_to_num(verdict) > 0.5

    @property
    def pass_rate(self) -> float:
        """Share of the completions that are correct."""
        return float(self.correct.mean())

    @cached_property
    def dead(self) -> bool:
        """Whether all rewards are equal, compared one by one, so that the group teaches nothing.

        By component, these are the values of each function: their sum may tie where they do not. By step they
        are the step rewards of each function that gives any and the values of each other one.
        By token a completion is compared with a critic's values, so that whatever is scored teaches.
        """
        if self.credit == "completion":
            return len(set(self.rewards[self.scorable].tolist())) < 2
        if self.credit == "token":
            return not self.scorable.any()
        each = [self.compared(int(i)) for i in np.flatnonzero(self.scorable)]
        names = each[0] if each else ()
        return all(len(set().union(*(own[name] for own in each))) < 2 for name in names)

    def compared(self, i: int) -> dict[str, set[float]]:
        """name -> what the function paid completion i: for its steps, where it gives any."""
        values = {name: set(own[[i]][~np.isnan(own[[i]])].tolist()) for name, own in self.components.items()}
        if self.credit != "component":
            values |= {name: set(own[i].values) for name, own in self.steps.items()}
        return {name: own for name, own in values.items() if self.weights.get(name, 1.0)}
