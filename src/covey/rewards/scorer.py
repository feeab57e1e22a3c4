"""The scorer, which scores completions while others are still being generated.

From a completion to its reward:

1. ``Scorer.begin_group`` makes a ``GroupScoring`` for the G completions of a problem.
2. ``GroupScoring.add`` takes a completion that has ended. It starts the calls of the per-sample rewards.
   The last completion also starts the calls of the rewards that score a group.
3. ``Rewards.start_call`` makes a call where its function runs: a built-in one in a thread or on the event
   loop, a user's function by its ``Caller`` in this process, in a worker, or in a process for each call.
4. ``GroupScoring.result`` waits for all calls. A failed one gives scores without a value.
5. ``groups.assemble`` applies gates and weights to the scores, and returns the ``Group`` with its rewards.

Results are ordered by sample, never by arrival.
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
from covey.rewards.reading import ReplyReader
from covey.rewards.worker import (
    ASYNC_CALLS,
    Caller,
    Inline,
    Isolated,
    Link,
    UserCall,
    Worker,
    WorkerLink,
    arguments_to_send,
    scores_of_call,
)
from covey.rewards.worker_process import UserSetup
from covey.system.text import escape_controls
from covey.types import Completion, Group, Problem, Transcript
from covey_verify.errors import CoveyError, describe_error, trace_of
from covey_verify.extract import content_text, text_of
from covey_verify.texts.judge import JudgeFailed
from covey_verify.threads import SHARED_SIZE, Call, Executor
from covey_verify.types import Messages, Score


@dataclass(frozen=True, eq=False)
class Rewards:
    """The reward functions of a run, with the threads and processes that they run in.

    A copy (``dataclasses.replace``) with another reader shares threads and processes.
    """

    rewards: Sequence[Reward]
    timeout: float = 60.0
    """Seconds for a call of a function that declares no limit of its own."""
    max_infra: float = 0.2
    """Largest fraction of a step's calls that may fail."""
    noise: float = 0.0
    """Fraction of the labels that are flipped before training."""
    sandbox: Mapping[str, object] | None = None
    """The sandbox that model code runs in, if any does; for the run's record."""
    reader: ReplyReader = field(default_factory=ReplyReader)
    """The reader of completions; a model's own one, once the model is loaded, knows its texts."""
    link: Callable[[UserSetup], WorkerLink] = Link
    """Starts the process of a worker."""
    executor: Executor = field(default_factory=Executor)
    callers: dict[str, Caller] = field(default_factory=dict)
    """A user's function, by name -> its caller; filled at the first call."""
    reported: set[str] = field(default_factory=set)
    """Functions whose first failure has been printed."""

    def __iter__(self) -> Iterator[Reward]:
        return iter(self.rewards)

    def __getitem__(self, index: int) -> Reward:
        return self.rewards[index]

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def verdict(self) -> Reward:
        """The reward that decides what is correct. Raises ConfigError if that cannot be determined."""
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
        group = Scorer(self, strict=strict).begin_group(problem, prompt, len(completions))
        for sample, completion in enumerate(completions):
            group.add(sample, completion)
        return group.result()

    def start_call(
        self, reward: Reward, problem: Problem, completions: Sequence[Completion], context: Context
    ) -> Call[Any]:
        """Start one call of a reward function and return it, without waiting.

        A user's function is called where it declares, a built-in one in a thread or on the event loop.
        """
        arguments = reward.arguments(problem, completions, context)
        seconds = reward.options.timeout or self.timeout
        if reward.ours and reward.is_async:
            return self.executor.submit_async(reward.function(**arguments), seconds)
        if reward.ours:
            size = thread_count(reward)
            pool = "shared" if size > 1 else reward.name
            return self.executor.submit(pool, size, partial(reward.function, **arguments), seconds)
        if reward.place != "inline":
            arguments = arguments_to_send(reward, arguments)
        call = UserCall(problem, arguments, len(completions), context, seconds)
        # The thread only waits, without a limit: ``scores_of_call`` times each call that it makes.
        wait = partial(scores_of_call, self._caller(reward), call)
        return self.executor.submit(reward.name, waiting_threads(reward), wait, math.inf)

    def _caller(self, reward: Reward) -> Caller:
        """Return the caller of a user's reward, its process started if needed.

        Raises RewardError if it cannot start.
        """
        caller = self.callers.get(reward.name)
        if caller is not None:
            return caller
        if reward.place == "inline":
            caller = Inline(reward, self.executor, thread_count(reward))
        elif reward.place in ("process", "sandbox"):
            caller = Isolated(reward)
        else:
            worker = Worker(reward, self.link)
            worker.start()
            caller = worker
        self.callers[reward.name] = caller
        return caller

    def report_failure(self, reward: Reward, problem: Problem, reason: str) -> None:
        """Print why a call failed, the first time for each function."""
        if reward.name not in self.reported:
            self.reported.add(reward.name)
            # An exception often quotes the completion.
            words = f"reward {reward.name} on problem {problem.id} failed: {reason}"
            print(escape_controls(words), file=sys.stderr)

    def score_of_failure(self, reward: Reward, problem: Problem, error: Exception) -> Score:
        """Return the score of a failed call (raised or hung); print a function's first failure."""
        reason = _reason_of_failure(reward, error)
        self.report_failure(reward, problem, f"{reason}\n{_trace_of_failure(error)}")
        return Score(None, "infra_error", detail=reason[:300])


def thread_count(reward: Reward) -> int:
    """Return how many threads may call a function at once: one, unless it declares itself concurrent."""
    return SHARED_SIZE if reward.options.concurrent else 1


def waiting_threads(reward: Reward) -> int:
    """Return how many threads may wait for a user's function, which is called elsewhere."""
    if reward.is_async:
        return ASYNC_CALLS
    # Each call has a process of its own.
    return SHARED_SIZE if reward.place in ("process", "sandbox") else thread_count(reward)


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
    def sum_over(cls, parts: Sequence[ScoringStats]) -> ScoringStats:
        """Return the sum over several processes; their waits overlapped, so the longest counts."""
        logged = dict[str, list[float]]()
        for part in parts:
            for name, values in part.logged.items():
                logged.setdefault(name, []).extend(values)
        return cls(
            sum(part.calls for part in parts),
            sum(part.completions for part in parts),
            max(part.waited for part in parts),
            logged,
        )


class Scorer:
    """The scorer of some groups, such as a training step's. Several scorers may run at once."""

    def __init__(self, rewards: Rewards, step: int = 0, strict: bool = False) -> None:
        self.rewards = rewards
        self.strict = strict
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

    def begin_group(self, problem: Problem, prompt: np.ndarray, size: int) -> GroupScoring:
        """Begin a group, to which completions are added as they end."""
        return GroupScoring(self, problem, prompt, size)

    def begin_text(self, problem: Problem, answer: str | Messages) -> GroupScoring:
        """Begin a group of one completion, of which only the text or the turns are known."""
        group = self.begin_group(problem, np.zeros(0, np.int64), 1)
        group.add(0, completion_of(answer, tokens=0))
        return group

    def score(self, reward: Reward, problem: Problem, text: str) -> Score:
        """Return one function's score of a text, ignoring its gate. Raises RewardError."""
        call = self.rewards.start_call(reward, problem, [completion_of(text)], self.context)
        (score,) = self.await_scores(reward, problem, call, 1)
        return score

    def await_scores(self, reward: Reward, problem: Problem, call: Call[Any], count: int) -> list[Score]:
        """Wait for a call's scores. Raises RewardError; if ``strict``, also where the function raised."""
        try:
            returned = call.result()
        except CoveyError:
            raise  # a user's mistake, not a failure of a reward
        except Exception as error:
            if self.strict:
                raise reward.error_in_row(problem.id, _reason_of_failure(reward, error)) from error
            return [self.rewards.score_of_failure(reward, problem, error)] * count
        # The caller of a user's function has already checked the returned values and made Scores of them.
        return returned if not reward.ours else reward.scores(problem.id, returned, count)


class PendingCall(NamedTuple):
    """A call of a reward function that was started."""

    reward: Reward
    samples: Sequence[int]
    """The completions of the group that it scores."""
    context: Context
    call: Call[Any]


class GroupScoring:
    """A group whose completions are still being scored."""

    def __init__(self, scorer: Scorer, problem: Problem, prompt: np.ndarray, size: int) -> None:
        self.scorer = scorer
        self.problem = problem
        self.prompt = prompt
        self.size = size
        self.completions: dict[int, Completion] = {}
        self.calls: list[PendingCall] = []
        self.scores = {reward.name: [Score(None)] * size for reward in scorer.rewards}
        """Reward name -> G scores; ``result`` fills in the scores that calls return."""

    def add(self, sample: int, completion: Completion) -> None:
        """Add a completion that has ended, and start the calls that it makes possible."""
        self.completions[sample] = completion
        for reward in self.scorer.rewards:
            if reward.per_sample:
                self._start_call(reward, [sample])
            elif len(self.completions) == self.size:
                self._start_call(reward, range(self.size))

    def _start_call(self, reward: Reward, samples: Sequence[int]) -> None:
        complete = list[int]()
        for sample in samples:
            if lacks_environment(reward, self.problem, self.completions[sample]):
                # A function of a group still scores the siblings.
                self.scores[reward.name][sample] = LOST
            else:
                complete.append(sample)
        if not complete:
            return
        scorer = self.scorer
        completions = [self.completions[sample] for sample in complete]
        context = scorer.context.for_call()
        call = scorer.rewards.start_call(reward, self.problem, completions, context)
        self.calls.append(PendingCall(reward, complete, context, call))
        scorer.calls += 1
        scorer.completions += len(complete)

    def result(self) -> Group:
        """Wait for all scores. Raises RewardError."""
        rewards = self.scorer.rewards
        began = time.perf_counter()
        for reward, samples, context, call in self.calls:
            scores = self.scorer.await_scores(reward, self.problem, call, len(samples))
            for fault in context.faults:
                rewards.report_failure(reward, self.problem, fault)
            for sample, score in zip(samples, context.with_extra(scores), strict=True):
                self.scores[reward.name][sample] = score
        self.scorer.waited += time.perf_counter() - began
        completions = [self.completions[sample] for sample in range(self.size)]
        return assemble(self.problem, self.prompt, completions, rewards.rewards, self.scores)


def completion_of(answer: str | Messages, tokens: int = 1) -> Completion:
    """Return a completion of a text or of turns that were not sampled, with ``tokens`` zero ids."""
    transcript = Transcript()
    if isinstance(answer, str):
        text = answer
    else:
        turns = tuple({**turn, "content": content_text(turn.get("content"))} for turn in answer)
        text = text_of(list(turns))
        # One turn without calls is a text, whose calls are still to be read.
        if len(turns) > 1 or any(turn.get("tool_calls") for turn in turns):
            transcript = Transcript(turns)
    ids = np.zeros(tokens, np.int64)
    return Completion(ids, np.zeros(tokens, np.float32), text, "stop", transcript=transcript)


def _reason_of_failure(reward: Reward, error: Exception) -> str:
    if isinstance(error, CallFailed | JudgeFailed):
        return str(error)  # the reason was put into words where the call failed
    return describe_error(error, reward.file)


def _trace_of_failure(error: Exception) -> str:
    if isinstance(error, CallFailed):
        return error.trace
    if isinstance(error, TimeoutError | JudgeFailed):  # their traces show only the code that waited
        return ""
    return trace_of(error)
