"""The interface of a sampler: requests in, completions with the log-prob of every token out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from covey.types import NO_PROBLEM, Completion, Problem

if TYPE_CHECKING:  # the pages read completions without a model, and importing one takes seconds
    from covey.models.policy import Policy


@dataclass(frozen=True)
class SamplingParams:
    """Settings of how completions are drawn."""

    max_tokens: int = 512
    temperature: float = 1.0
    """Softmax temperature; 0 is greedy."""
    top_p: float = 1.0
    """Keep the smallest set of tokens that holds this probability."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    stop: tuple[str, ...] = ()
    """A completion ends with the token that completes one of these strings."""
    end_ids: tuple[int, ...] | None = None
    """A completion ends with one of these tokens; None: with the policy's own ``end_ids``."""

    def ends_of(self, policy: Policy) -> Sequence[int]:
        """Return the tokens that end a completion of this policy."""
        return policy.end_ids if self.end_ids is None else self.end_ids

    @property
    def truncates(self) -> bool:
        """Whether some tokens cannot be drawn, so that log-probs are renormalized over the others."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)


@dataclass(frozen=True)
class Request:
    """One prompt and the random streams of the completions wanted for it."""

    prompt: np.ndarray
    """(P,) int64 token ids."""
    streams: Sequence[int]
    """One key per completion: its t-th token is drawn with the t-th uniform of this key."""
    prefix_tokens: int = 0
    """Number of tokens at the end of the prompt that were drawn before, and belong to the completion."""
    max_tokens: int | None = None
    """Most tokens of a completion, if fewer than ``SamplingParams.max_tokens``."""
    problem: Problem = NO_PROBLEM
    """The problem that the prompt belongs to, for tools that read its columns."""
    greedy: bool = False
    """Whether the likeliest token is taken each time, whatever the temperature."""

    @property
    def problem_prompt(self) -> np.ndarray:
        """The prompt without the tokens that belong to the completion."""
        return self.prompt[: -self.prefix_tokens] if self.prefix_tokens else self.prompt

    def limit(self, params: SamplingParams) -> int:
        """Return the most tokens that a completion may have."""
        return params.max_tokens if self.max_tokens is None else min(self.max_tokens, params.max_tokens)


class SampledCompletion(NamedTuple):
    """A finished completion and the request it answers."""

    request: int
    sample: int
    completion: Completion


class SamplerMonitor:
    """Gets told of a sampler's work, by calls of its methods. The base class ignores them."""

    def tokens_drawn(self, drawn: int, most_left: int) -> None:
        """Called before each token of all running completions; it may raise to stop.

        ``most_left`` is an upper bound on the number of tokens still to come.
        """

    def fewer_running(self, running: int) -> None:
        """Called with the number of completions that run at once after memory ran out."""

    def server_changed(self, what: str) -> None:
        """Called with a sentence on each event of a server."""

    def result_awaited(self) -> None:
        """Called once a second while no server's result arrives; it may raise to stop."""


class Weights(Protocol):
    """The part of the learner that a sampler sees: the weights to follow and their version."""

    version: int
    """Number of optimizer steps that moved the weights."""

    @property
    def network(self) -> Policy:
        """The model that has these weights."""


class Sampler(Protocol):
    """Anything that can answer requests with completions."""

    @property
    def version(self) -> int:
        """Number of optimizer steps that its weights have seen."""

    @property
    def samples_on_every_rank(self) -> bool:
        """Whether several processes share the requests; otherwise rank 0 asks for all of them."""

    @property
    def bit_exact(self) -> bool:
        """Whether its log-probs are bit-exact: the bits of the trained policy's ``token_outputs``."""

    def sync(self, weights: Weights) -> None:
        """Sample from these weights from now on."""
        ...

    def sample(self, requests: Sequence[Request], params: SamplingParams) -> Iterator[SampledCompletion]:
        """Yield completions as they end, in no particular order."""
