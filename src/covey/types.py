"""The data that all rooms pass on: Problem -> Completion -> Group. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from typing import Literal

import numpy as np

from covey_verify.extract import TAGS, Thoughts, last_text
from covey_verify.types import Messages, Score, StepRewards

VERSION = "0.2.0"

Credit = Literal["completion", "component", "step", "token"]
"""The unit that an algorithm gives an advantage to."""


@dataclass(frozen=True)
class AnswerTokens:
    """The tokens of an answer as they were sampled.

    >>> AnswerTokens((5, 8, 9, 6), (True, False, False, True)).inserted
    [[1, 3]]
    """

    ids: tuple[int, ...]
    """(T,): token ids, with the end of sequence if it was drawn."""
    drawn_mask: tuple[bool, ...]
    """(T,): true for a token that the model drew, false for one that a tool inserted."""

    @property
    def inserted(self) -> list[list[int]]:
        """The stretches that a tool inserted, each as [first, one after the last]."""
        # Framed by True, every stretch has two edges, at its ends as well; so they pair up as rows.
        edges = np.flatnonzero(np.diff(np.array((True, *self.drawn_mask, True)).astype(int)))
        return [list(map(int, span)) for span in edges.reshape(-1, 2)]


@dataclass(frozen=True)
class SampledTokens:
    """Token ids of a row that an earlier stage sampled; they are trained unchanged, whatever `data` says."""

    tokenizer: str
    """Hash of the vocabulary that the ids belong to."""
    prompt: tuple[int, ...]
    """(P,): the prompt as the model read it."""
    answers: Mapping[str, AnswerTokens]
    """Column -> the tokens sampled for it."""


@dataclass(frozen=True)
class Problem:
    """One task instance: the prompt for the model and the columns that rewards judge by.

    >>> Problem("sums/train/7", "2+3=", {"answer": "5"}).columns["answer"]
    '5'
    """

    id: str
    """Name, unique and stable in its stream; part of the key of every random draw made for it."""
    prompt: str | Messages
    """Plain text, or chat messages that go through the model's template."""
    columns: Mapping[str, object] = field(default_factory=dict)
    """Every other field of the row, handed to the reward functions by name."""
    template: Mapping[str, object] = field(default_factory=dict)
    """Variables of the chat template besides the messages: `tools`, `documents`, `enable_thinking`, ..."""
    asked_in_text: bool = False
    """Whether the messages were made from a text (`data.chat`, `data.system`); rewards then get texts."""
    sampled_tokens: SampledTokens | None = None
    """Token ids, if an earlier stage of covey sampled the row; None if its texts have to be encoded."""
    thoughts: Thoughts = TAGS
    """The model's marks of thoughts, and whether the prompt opens them; known once that is encoded."""

    def ends_with(self, text: str) -> bool:
        """Whether the prompt, or its last message, ends with ``text``."""
        return last_text(self.prompt).endswith(text)

    @property
    def chat(self) -> bool:
        """Whether the prompt is a list of messages, so that an answer is a message too."""
        return not isinstance(self.prompt, str)


NO_PROBLEM = Problem("", "")
"""Placeholder: for a bare prompt, and for groups sent to processes that already have the problem."""


@dataclass(frozen=True)
class SamplingMask:
    """The ids that top_p and top_k kept at each of T positions, as one ragged array.

    >>> mask = SamplingMask.of([np.array([4, 7]), np.array([2])])
    >>> mask.ids.tolist(), mask.ends.tolist()
    ([4, 7, 2], [2, 3])
    """

    ids: np.ndarray
    """(K,) int32: the ids kept at position 0, then those of position 1, ...; ascending in each."""
    ends: np.ndarray
    """(T,) int64: for each position, the index in ``ids`` one after its last id."""

    @classmethod
    def of(cls, ids_by_position: Sequence[np.ndarray]) -> SamplingMask:
        """Build a mask from the ids kept at each position."""
        # Concatenating nothing is an error, so an empty array comes first.
        empty = np.zeros(0, np.int32)
        ends = np.cumsum([len(ids) for ids in ids_by_position], dtype=np.int64)
        return cls(np.concatenate([empty, *ids_by_position]).astype(np.int32), ends)

    @classmethod
    def join(cls, masks: Sequence[SamplingMask]) -> SamplingMask:
        """Concatenate the masks of several completions.

        >>> one = SamplingMask.of([np.array([4, 7])])
        >>> SamplingMask.join([one, one]).ends.tolist()
        [2, 4]
        """
        # (masks + 1,): where each mask's ids begin in the joined array; the last entry is their number.
        starts = np.cumsum([0, *(len(m.ids) for m in masks)])
        ends = [m.ends + start for m, start in zip(masks, starts, strict=False)]
        ids = np.concatenate([np.zeros(0, np.int32), *(m.ids for m in masks)])
        return cls(ids, np.concatenate([np.zeros(0, np.int64), *ends]))

    def flat(self, start: int, stop: int, vocabulary: int) -> np.ndarray:
        """Indices of the ids kept at positions ``start`` to ``stop`` in a flat (stop - start, V) array.

        >>> SamplingMask.of([np.array([4]), np.array([0, 2])]).flat(1, 2, 10).tolist()
        [0, 2]
        """
        ends = self.ends[start:stop]
        first = int(self.ends[start - 1]) if start else 0
        # The row of each kept id: a position's number, as often as it keeps ids.
        rows = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=first))
        return rows * vocabulary + self.ids[first : first + len(rows)]

    def until(self, length: int) -> SamplingMask:
        """Return the mask of the first ``length`` positions.

        >>> SamplingMask.of([np.array([4, 7]), np.array([2])]).until(1).ids.tolist()
        [4, 7]
        """
        ends = self.ends[:length]
        return SamplingMask(self.ids[: int(ends[-1]) if length else 0], ends)


@dataclass(frozen=True)
class Provenance:
    """The weights and the server that drew a completion."""

    version: int = 0
    """Optimizer steps that the sampling policy had taken when it drew the first token."""
    versions: np.ndarray | None = None
    """(T,) int64: ``version`` of each token, if weights can change within a completion. None: all equal."""
    server: str = ""
    """Address of the server that drew the first token; empty if this process did, or if it is not known."""


@dataclass(frozen=True)
class Transcript:
    """A completion's conversation with its tools, and the end of its environment."""

    turns: tuple[Mapping[str, object], ...] = ()
    """Turns of the model and its tools, as messages {role, content}, with `tool_calls` where the model called
    a tool; empty if no tool answered."""
    environment: Mapping[str, object] | None = None
    """Attributes of the environment at the end; None if there is none, or if it hung, died or has a
    ``fault``."""
    fault: str = ""
    """The error that the environment raised when asked for its reward, after the model's calls."""


ALL_DRAWN = np.ones(0, bool)
"""``drawn_mask`` of a completion without inserted tokens; the completion makes it as long as its tokens."""


@dataclass(frozen=True)
class Completion:
    """The tokens that follow a problem's prompt; they are never re-tokenized.

    >>> mask = np.array([True, False, False, True])
    >>> call = Completion(np.array([5, 8, 9, 6]), np.zeros(4), "", "stop", drawn_mask=mask)
    >>> call.length, call.tokens[call.drawn_mask].tolist()
    (2, [5, 6])
    """

    tokens: np.ndarray
    """(T,) int64: the ids, the end-of-sequence token included when it was drawn."""
    logprobs: np.ndarray
    """(T,) float32, nats: log-prob of each token where it was drawn; 0 for inserted ones."""
    text: str
    """Text of the drawn tokens, special ones included, without the end of each turn (``models.text``).
    Rewards and people read it; training does not."""
    finish: Literal["stop", "length"]
    """``stop``: ended by itself. ``length``: truncated at the token limit."""
    provenance: Provenance = Provenance()
    drawn_mask: np.ndarray = field(default_factory=lambda: ALL_DRAWN)
    """(T,) bool: the tokens that the model drew. The others were inserted (a tool's output, a turn of the
    user): the model reads them, and they are neither trained nor counted."""
    sampling_mask: SamplingMask | None = None
    """Ids that could be drawn at each position (at an inserted token only itself); None if all could."""
    transcript: Transcript = Transcript()

    def __post_init__(self) -> None:
        if self.drawn_mask is ALL_DRAWN:
            object.__setattr__(self, "drawn_mask", np.ones(len(self.tokens), bool))
        versions = () if self.provenance.versions is None else (self.provenance.versions,)
        arrays = (self.tokens, self.logprobs, self.drawn_mask, *versions)
        assert len({len(values) for values in arrays}) == 1, "one value a token"

    @property
    def token_versions(self) -> np.ndarray:
        """(T,) int64: the version of the weights that drew each token."""
        provenance = self.provenance
        return (
            np.full(len(self.tokens), provenance.version)
            if provenance.versions is None
            else provenance.versions
        )

    @property
    def length(self) -> int:
        """Number of drawn tokens."""
        return int(self.drawn_mask.sum())

    @property
    def parts(self) -> list[tuple[bool, np.ndarray]]:
        """The runs of tokens that were all drawn (True) or all inserted (False), in order.

        >>> mask = np.array([True, False, False])
        >>> one = Completion(np.array([5, 8, 9]), np.zeros(3), "", "stop", drawn_mask=mask)
        >>> [(drawn, tokens.tolist()) for drawn, tokens in one.parts]
        [(True, [5]), (False, [8, 9])]
        """
        edges = np.flatnonzero(np.diff(self.drawn_mask)) + 1
        # A completion without tokens is split into one empty run, which is dropped.
        runs = zip(np.split(self.drawn_mask, edges), np.split(self.tokens, edges), strict=True)
        return [(bool(drawn[0]), tokens) for drawn, tokens in runs if len(tokens)]

    def until(self, length: int) -> Completion:
        """Return the first ``length`` tokens; the text is still that of all.

        >>> Completion(np.array([5, 8]), np.zeros(2), "ab", "stop").until(1).tokens.tolist()
        [5]
        """
        versions = self.provenance.versions
        mask = self.sampling_mask
        return replace(
            self,
            tokens=self.tokens[:length],
            logprobs=self.logprobs[:length],
            provenance=replace(self.provenance, versions=None if versions is None else versions[:length]),
            drawn_mask=self.drawn_mask[:length],
            sampling_mask=None if mask is None else mask.until(length),
        )

    def then(self, more: Completion) -> Completion:
        """Join this completion with the one that continues it.

        >>> said, tool = Completion(np.array([5]), np.zeros(1), "a", "stop"), np.array([8, 9])
        >>> said.then(Completion(tool, np.zeros(2), "", "stop", drawn_mask=tool < 0)).drawn_mask.tolist()
        [True, False, False]
        """
        both, join = (self, more), np.concatenate
        masks = [c.sampling_mask for c in both if c.sampling_mask is not None]
        assert len(masks) != 1, "one sampler drew both"
        by_token = any(c.provenance.versions is not None for c in both)
        versions = join([c.token_versions for c in both]) if by_token else None
        # The first part says where it began (version, server), the second how it ended.
        return Completion(
            join([c.tokens for c in both]),
            join([c.logprobs for c in both]),
            self.text + more.text,
            more.finish,
            replace(self.provenance, versions=versions),
            join([c.drawn_mask for c in both]),
            SamplingMask.join(masks) if masks else None,
            replace(more.transcript, turns=self.transcript.turns + more.transcript.turns),
        )


@dataclass(frozen=True)
class Component:
    """One reward function's part in the rewards of a group."""

    values: np.ndarray
    """(G,) float64, unweighted; NaN = not applicable."""
    weight: float
    """Factor of ``values`` in the group's rewards."""
    scores: tuple[Score, ...]
    """(G,): the whole scores that the function returned."""
    steps: tuple[StepRewards, ...] = ()
    """(G,): step rewards of each completion, unweighted; empty if the function gave none."""
    verdict: bool = False
    """Whether it decides which completions are correct."""


@dataclass(frozen=True)
class Baselines:
    """The values that some estimators compare a group's rewards with; each is known only if asked for."""

    greedy_reward: float = math.nan
    """Reward of the greedy completion."""
    running_mean: np.ndarray | None = None
    """(G,) float64: mean of the rewards before each completion."""
    segments: tuple[StepRewards, ...] = ()
    """(G,): value after each segment but the last, from sampled continuations."""


@dataclass(frozen=True)
class Group:
    """The scored completions of one problem."""

    problem: Problem
    prompt: np.ndarray
    """(P,) int64: token ids of the prompt as the model saw it."""
    completions: tuple[Completion, ...]
    rewards: np.ndarray
    """(G,) float64: weighted sum of the components; NaN where no reward function could judge."""
    components: Mapping[str, Component] = field(default_factory=dict)
    """The parts of the reward functions, by name; empty if the rewards are given labels."""
    credit: Credit = "completion"
    """The unit that gets an advantage; it decides what ``rewards`` sums and what ``dead`` compares."""
    baselines: Baselines = Baselines()

    def __post_init__(self) -> None:
        assert len(self.rewards) == len(self.completions), "one reward a completion"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the problem, and each completion with its reward."""
        lines = zip(self.completions, self.rewards, strict=True)
        rows = [f"<tr><td>{reward:.3g}</td><td>{escape(c.text)}</td></tr>" for c, reward in lines]
        return f"<div>{escape(str(self.problem.prompt))}</div><table>{''.join(rows)}</table>"

    @cached_property
    def scorable(self) -> np.ndarray:
        """(G,) bool: which completions got a reward."""
        return ~np.isnan(self.rewards)

    @property
    def has_verdict(self) -> bool:
        """Whether it is known which completions are correct."""
        return len(self._verdicts) == 1

    @cached_property
    def correct(self) -> np.ndarray:
        """(G,) bool: the verdict is above one half."""
        assert self.has_verdict, f"which of {list(self.components)} says what is correct?"
        # NaN (no verdict) becomes 0 and so counts as incorrect.
        return np.nan_to_num(self._verdicts[0]) > 0.5

    @property
    def _verdicts(self) -> list[np.ndarray]:
        """Values of the component that is the verdict; of all of them if none is marked."""
        marked = [c.values for c in self.components.values() if c.verdict]
        return marked or [c.values for c in self.components.values()] or [self.rewards]

    @property
    def verdict_mask(self) -> np.ndarray:
        """(G,) bool: which completions got a verdict; a reward they may have without one."""
        assert self.has_verdict, f"which of {list(self.components)} says what is correct?"
        return ~np.isnan(self._verdicts[0])

    @property
    def pass_rate(self) -> float:
        """Fraction of the completions with a verdict that are correct; 0 if none has one."""
        return float(self.correct[self.verdict_mask].mean()) if self.verdict_mask.any() else 0.0

    @cached_property
    def dead(self) -> bool:
        """Whether all rewards are equal, so that the group teaches nothing; ``credit`` decides which rewards.

        `component`: the values of each function, since their sums may tie where they do not.
        `step`: the step rewards of each function that gives any, and the values of the others.
        `token`: a critic's values are the baseline, so any scored completion teaches.
        """
        if self.credit == "completion":
            return len(set(self.rewards[self.scorable].tolist())) < 2
        if self.credit == "token":
            return not self.scorable.any()
        # All values of a function in one set: a single element means that it tells no two apart.
        outcomes = [self.values_of(int(i)) for i in np.flatnonzero(self.scorable)]
        names = outcomes[0] if outcomes else ()
        return all(len(set().union(*(values[name] for values in outcomes))) < 2 for name in names)

    def values_of(self, i: int) -> dict[str, set[float]]:
        """name -> the values that the function gave completion i: one a step, if it rewards steps."""
        values: dict[str, set[float]] = {}
        for name, component in self.components.items():
            if not component.weight:
                continue  # a function that is only reported cannot make a group teach
            if component.steps and self.credit != "component":
                values[name] = set(component.steps[i].values)
            else:
                values[name] = set() if np.isnan(component.values[i]) else {float(component.values[i])}
        return values
