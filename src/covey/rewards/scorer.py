"""The scorer, which scores completions while others are still being generated.

Each completion is passed to the per-sample rewards as soon as it ends, each group to the others as soon
as it is whole. Results are ordered by sample, never by arrival.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from covey.rewards.blame import CallFailed
from covey.rewards.contract import Context, Reward, verdict_of
from covey.rewards.environments import LOST, lacks_environment
from covey.rewards.groups import assemble
from covey.rewards.reading import Reader
from covey.rewards.serving import UserSetup
from covey.rewards.worker import ASYNC_CALLS, Inline, Isolated, Link, Worker, WorkerLink, sent
from covey.types import Completion, Group, Problem, Transcript
from covey_verify.errors import CoveyError, described, trace_of
from covey_verify.extract import content_text, text_of
from covey_verify.texts.judge import JudgeFailed
from covey_verify.threads import SHARED_SIZE, Call, Executor
from covey_verify.types import Messages, Score


class Rewards:
    """The reward functions of a run, with the threads and processes that they run in."""

    def __init__(
        self,
        rewards: Sequence[Reward],
        timeout: float = 60.0,
        max_infra: float = 0.2,
        noise: float = 0.0,
        sandbox: Mapping[str, object] | None = None,
    ) -> None:
        self.rewards, self.timeout, self.max_infra = tuple(rewards), timeout, max_infra
        self.noise = noise
        """Fraction of the labels that are flipped before training."""
        self.sandbox = sandbox
        """The sandbox that model code runs in, if any does; for the run's record."""
        self.reader = Reader()
        """The reader of completions, set when the model is loaded, whose texts it knows."""
        self.executor = Executor()
        # Reward name -> the caller of its process; filled at the first call.
        self.apart: dict[str, Worker | Isolated | Inline] = {}
        self.link: Callable[[UserSetup], WorkerLink] = Link
        """Starts the process of a worker."""
        self.shown: set[str] = set()
        """Functions whose first failure has been printed."""

    def __iter__(self) -> Iterator[Reward]:
        return iter(self.rewards)

    def __getitem__(self, index: int) -> Reward:
        return self.rewards[index]

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def verdict(self) -> Reward:
        """The reward that says what is correct. Raises ConfigError where that cannot be known."""
        return verdict_of(self.rewards)

    @property
    def criterion(self) -> str:
        """The rule for a correct completion, in words. Raises ConfigError if there is no verdict."""
        return f"A completion counts as correct if {self.verdict.name} > 0.5."

    @property
    def inline(self) -> list[str]:
        """Names of the user's functions that are called in this process."""
        return [r.name for r in self if not r.ours and r.place == "inline"]

    def score_group(
        self, problem: Problem, prompt: np.ndarray, completions: Sequence[Completion], strict: bool = False
    ) -> Group:
        """Score a group whose completions have all ended; if ``strict``, a function that raises is an error.

        Raises RewardError.
        """
        group = Scorer(self, strict=strict).group(problem, prompt, len(completions))
        for sample, completion in enumerate(completions):
            group.add(sample, completion)
        return group.result()

    def submit(
        self, reward: Reward, problem: Problem, completions: Sequence[Completion], context: Context
    ) -> Call[Any]:
        """Start one call of a reward function and return it, without waiting.

        A user's function is called where it declares, a built-in one in a thread or on the event loop.
        """
        arguments = reward.arguments(problem, completions, context)
        limit = reward.options.timeout or self.timeout  # seconds
        if not reward.ours:
            # This thread only waits, for calls that are timed one by one.
            given = arguments if reward.place == "inline" else sent(reward, arguments)
            called = partial(self._apart(reward).call, problem, given, len(completions), context, limit)
            return self.executor.submit(reward.name, waiting_threads(reward), called, math.inf)
        if reward.is_async:
            return self.executor.submit_async(reward.function(**arguments), limit)
        called = partial(reward.function, **arguments)
        size = threads(reward)
        return self.executor.submit("shared" if size > 1 else reward.name, size, called, limit)

    def _apart(self, reward: Reward) -> Worker | Isolated | Inline:
        """Return the caller of a user's reward, its process started if needed.

        Raises RewardError if it cannot start.
        """
        if reward.name not in self.apart:
            if reward.place == "inline":
                self.apart[reward.name] = Inline(reward, self.executor, threads(reward))
            elif reward.place in ("process", "sandbox"):
                self.apart[reward.name] = Isolated(reward)
            else:
                worker = Worker(reward, self.link)
                worker.start()
                self.apart[reward.name] = worker
        return self.apart[reward.name]

    def show_first(self, reward: Reward, problem: Problem, why: str) -> None:
        """Print why a call failed, the first time for each function."""
        if reward.name not in self.shown:
            self.shown.add(reward.name)
            print(f"reward {reward.name} on problem {problem.id} failed: {why}", file=sys.stderr)

    def failed(self, reward: Reward, problem: Problem, error: Exception) -> Score:
        """Return the score of a failed call (raised or hung); print a function's first failure."""
        words = _in_words(reward, error)
        told = isinstance(error, TimeoutError | JudgeFailed)  # their traces show the waiter only
        trace = error.trace if isinstance(error, CallFailed) else "" if told else trace_of(error)
        self.show_first(reward, problem, f"{words}\n{trace}")
        return Score(None, "infra_error", detail=words[:300])


def threads(reward: Reward) -> int:
    """Return how many threads may call a function at once: one, unless it declares itself concurrent."""
    return SHARED_SIZE if reward.options.concurrent else 1


def waiting_threads(reward: Reward) -> int:
    """Return how many threads may wait for a user's function, which is called elsewhere."""
    if reward.is_async:
        return ASYNC_CALLS
    # Each call has a process of its own.
    return SHARED_SIZE if reward.place in ("process", "sandbox") else threads(reward)


@dataclass(frozen=True)
class ScoringStats:
    """The calls and the time of a scorer, and the values that its functions logged."""

    calls: int = 0
    """Number of calls of reward functions."""
    completions: int = 0
    """Number of completions in these calls."""
    waited: float = 0.0
    """Seconds spent on nothing but waiting for scores."""
    logged: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """The values that functions passed to TRL's ``log_metric``, by metric."""

    @classmethod
    def summed(cls, parts: Sequence[ScoringStats]) -> ScoringStats:
        """Return the sum over several processes; their waits overlapped, so the longest counts."""
        names = dict.fromkeys(name for part in parts for name in part.logged)
        return cls(
            sum(part.calls for part in parts),
            sum(part.completions for part in parts),
            max(part.waited for part in parts),
            {name: [v for part in parts for v in part.logged.get(name, ())] for name in names},
        )


class Scorer:
    """The scorer of some groups, such as those of one training step. Several scorers may run at once."""

    def __init__(self, rewards: Rewards, step: int = 0, strict: bool = False) -> None:
        self.rewards, self.strict = rewards, strict
        self.context = Context(step, rewards.reader, strict)
        self.calls = self.completions = 0
        self.waited = 0.0

    @property
    def stats(self) -> ScoringStats:
        """Statistics of all calls so far."""
        return ScoringStats(self.calls, self.completions, self.waited, dict(self.context.logged))

    def include(self, stats: ScoringStats) -> None:
        """Add another scorer's statistics."""
        self.calls += stats.calls
        self.completions += stats.completions
        self.waited += stats.waited
        for name, values in stats.logged.items():
            self.context.logged.setdefault(name, []).extend(values)

    def group(self, problem: Problem, prompt: np.ndarray, size: int) -> GroupScoring:
        """Begin a group, to which completions are added as they end."""
        return GroupScoring(self, problem, prompt, size)

    def text(self, problem: Problem, said: str | Messages) -> GroupScoring:
        """Begin a group of one completion, of which only the text or the turns are known."""
        group = self.group(problem, np.zeros(0, np.int64), 1)
        group.add(0, completion_of(said, tokens=0))
        return group

    def score(self, reward: Reward, problem: Problem, text: str) -> Score:
        """Return one function's score of a text, ignoring its gate. Raises RewardError."""
        call = self.rewards.submit(reward, problem, [completion_of(text)], self.context)
        (score,) = self.scores(reward, problem, call, 1)
        return score

    def scores(self, reward: Reward, problem: Problem, call: Call[Any], count: int) -> list[Score]:
        """Wait for a call's scores. Raises RewardError; if ``strict``, also where the function raised."""
        try:
            returned = call.result()
        except CoveyError:
            raise  # a user's mistake, not a failure of what judges
        except Exception as error:
            if self.strict:
                raise reward.broken(problem.id, _in_words(reward, error)) from error
            return [self.rewards.failed(reward, problem, error)] * count
        # The caller of a user's function has already checked the returned values and made Scores of them.
        return returned if not reward.ours else reward.scores(problem.id, returned, count)


class PendingCall(NamedTuple):
    """A call of a reward function that was started."""

    reward: Reward
    samples: Sequence[int]
    """The completions of the group that it scores."""
    context: Context
    call: Call[Any]


class SkippedCall(NamedTuple):
    """A call that was not made because the completion's environment is gone."""

    reward: Reward
    sample: int


class GroupScoring:
    """A group whose completions are being scored."""

    def __init__(self, scorer: Scorer, problem: Problem, prompt: np.ndarray, size: int) -> None:
        self.scorer, self.problem, self.prompt, self.size = scorer, problem, prompt, size
        self.completions: dict[int, Completion] = {}
        self.calls: list[PendingCall] = []
        self.skipped: list[SkippedCall] = []

    def add(self, sample: int, completion: Completion) -> None:
        """Add a completion that has ended, and start the calls that it makes possible."""
        self.completions[sample] = completion
        for reward in self.scorer.rewards:
            if reward.per_sample:
                self._submit(reward, [sample])
            elif len(self.completions) == self.size:
                self._submit(reward, range(self.size))

    def _submit(self, reward: Reward, samples: Sequence[int]) -> None:
        scorer = self.scorer
        # They get LOST in ``result``, so a group's function still judges the siblings.
        gone = [s for s in samples if lacks_environment(reward, self.problem, self.completions[s])]
        self.skipped += [SkippedCall(reward, sample) for sample in gone]
        samples = [s for s in samples if s not in gone]
        if not samples:
            return
        completions = [self.completions[s] for s in samples]
        context = scorer.context.of_call()
        call = scorer.rewards.submit(reward, self.problem, completions, context)
        self.calls.append(PendingCall(reward, samples, context, call))
        scorer.calls += 1
        scorer.completions += len(samples)

    def result(self) -> Group:
        """Wait for all scores. Raises RewardError."""
        rewards, begun = self.scorer.rewards.rewards, time.perf_counter()
        # Reward name -> G scores; Score(None) where a group lost every environment.
        found = {r.name: [Score(None)] * self.size for r in rewards}
        for reward, samples, context, call in self.calls:
            scores = context.with_extra(self.scorer.scores(reward, self.problem, call, len(samples)))
            for fault in context.faults:
                self.scorer.rewards.show_first(reward, self.problem, fault)
            for sample, score in zip(samples, scores, strict=True):
                found[reward.name][sample] = score
        for reward, sample in self.skipped:
            found[reward.name][sample] = LOST
        self.scorer.waited += time.perf_counter() - begun
        completions = [self.completions[s] for s in range(self.size)]
        return assemble(self.problem, self.prompt, completions, rewards, found)


def completion_of(said: str | Messages, tokens: int = 1) -> Completion:
    """Return a completion of a text or of turns that were not sampled, with ``tokens`` zero ids."""
    turns = (
        ()
        if isinstance(said, str)
        else tuple({**turn, "content": content_text(turn.get("content"))} for turn in said)
    )
    text = said if isinstance(said, str) else text_of(list(turns))
    # One turn without calls is a text, whose calls are still to be read.
    called = len(turns) > 1 or any(turn.get("tool_calls") for turn in turns)
    transcript = Transcript(turns if called else ())
    ids = np.zeros(tokens, np.int64)
    return Completion(ids, np.zeros(tokens, np.float32), text, "stop", transcript=transcript)


def _in_words(reward: Reward, error: Exception) -> str:
    """Return the reason why a call failed, for the console."""
    if isinstance(error, CallFailed | JudgeFailed):
        return str(error)  # it was put into words where it happened
    return described(error, reward.file)
