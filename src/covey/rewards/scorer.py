"""Judging completions while others are still being generated, and putting a group together.

Each completion goes to the per-sample rewards as soon as it ends, each group to the others as soon
as it is whole. Results stand by sample, never by arrival.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from covey.errors import ConfigError, CoveyError, RewardError
from covey.rewards.contract import CHILDREN, Reward, described, trace_of
from covey.rewards.lanes import SHARED_WIDTH, Lanes, Task
from covey.rewards.worker import ASYNC_WIDTH, Failed, Worker, rebuilt, sent
from covey.rng import key, uniforms
from covey.sandbox.client import GRACE, ForkServer
from covey.sandbox.confine import Limits
from covey.types import Completion, Group, Problem, Score, StepRewards

ANSWERED = ("ok", "ambiguous")
Call = tuple[Reward, Sequence[int], tuple[Task, Callable[[], None]]]


class Rewards(Sequence[Reward]):
    """The reward functions of a run, and what has happened to them."""

    def __init__(
        self,
        rewards: Sequence[Reward],
        timeout: float = 60.0,
        max_infra: float = 0.2,
        noise: float = 0.0,
        steps: int = 5,
    ) -> None:
        self.rewards, self.timeout, self.max_infra = tuple(rewards), timeout, max_infra
        self.noise = noise
        """Share of the verdicts that are turned over before they are trained on."""
        self.calls = self.judged = 0
        """Calls of reward functions so far, and completions in them."""
        self.waited = 0.0
        """Seconds that were spent on nothing but waiting for them."""
        self.recent: deque[tuple[int, int]] = deque(maxlen=steps)
        self.lanes = Lanes()
        self.servers: dict[str, ForkServer] = {}
        self.workers: dict[str, Worker] = {}
        self.refused: dict[str, int] = {}
        """How often in a row each function refused a completion known to be right."""
        self.sandbox: dict[str, Any] | None = None
        """For the record: where model code runs, if any does."""
        self.starting = threading.Lock()
        self.shown: set[str] = set()
        self.logged: dict[str, list[float]] = {}
        """What functions passed to TRL's ``log_metric`` in this step."""
        self.trainer_state = SimpleNamespace(global_step=0)
        self.extra: dict[str, Any] = {
            "decode": lambda _: "",  # of the tokenizer, where there is one
            "trainer_state": self.trainer_state,
            "log_metric": lambda name, value: self.logged.setdefault(str(name), []).append(float(value)),
            "log_extra": lambda *_: None,
        }

    def __getitem__(self, index: Any) -> Any:
        return self.rewards[index]

    def __len__(self) -> int:
        return len(self.rewards)

    def put(self, reward: Reward) -> None:
        """Take this one in the place of the reward of its name."""
        self.rewards = tuple(reward if r.name == reward.name else r for r in self.rewards)

    @property
    def verdict(self) -> Reward:
        """The reward that says what is correct. Raises ConfigError where that cannot be known."""
        return verdict_of(self.rewards)

    @property
    def criterion(self) -> str:
        """When a completion is correct, in words. Raises ConfigError where that cannot be known."""
        return f"correct = {self.verdict.name} > 0.5"

    def judge(
        self,
        problem: Problem,
        prompt: np.ndarray,
        completions: Sequence[Completion],
        strict: bool = False,
    ) -> Group:
        """Judge completions that are all there; ``strict``: a function that raises is an error.

        Raises RewardError.
        """
        pending = Pending(self, problem, prompt, len(completions), strict)
        for sample, completion in enumerate(completions):
            pending.add(sample, completion)
        return pending.group()

    def submit(
        self, reward: Reward, problem: Problem, completions: Sequence[Completion]
    ) -> tuple[Task, Callable[[], None]]:
        """Start one call."""
        arguments, limit = reward.arguments(problem, completions, self.extra), self.limit(reward)
        width = SHARED_WIDTH if reward.options.concurrent else 1
        if reward.place == "worker":
            worker = self.worker(reward)
            plain = sent(reward, arguments, self.extra)
            step = self.trainer_state.global_step
            call = partial(worker.call, problem, plain, len(completions), step, limit)
            width = ASYNC_WIDTH if reward.is_async else width
            return self.lanes.thread(reward.name, width, call, math.inf)  # the worker has a clock of its own
        if reward.place == "process":
            isolated = partial(self._isolated, reward, arguments, limit)
            # A child is ended by its own clock; only a wait for a place can make it later.
            return self.lanes.thread(reward.name, SHARED_WIDTH, isolated, 3 * limit + GRACE)
        if reward.is_async:
            return self.lanes.coroutine(reward.function(**arguments), limit)
        called = partial(reward.function, **arguments)
        return self.lanes.thread("shared" if width > 1 else reward.name, width, called, limit)

    def limit(self, reward: Reward) -> float:
        """Seconds a call may take."""
        return reward.options.timeout or self.timeout

    def worker(self, reward: Reward) -> Worker:
        """The process that judges for a reward. Raises RewardError if it cannot be started."""
        if reward.name not in self.workers:
            worker = Worker(reward, self.extra["log_metric"])
            worker.start()
            self.workers[reward.name] = worker
        return self.workers[reward.name]

    @property
    def inline(self) -> list[str]:
        """Names of the users' functions that are called in this process."""
        return [r.name for r in self if not r.ours and r.place == "inline"]

    def _isolated(self, reward: Reward, arguments: Mapping[str, Any], seconds: float) -> Any:
        """What a call returns that is made in a child of its own; a hang is the completion's fault."""
        file, name = reward.file, reward.function.__name__
        with self.starting:
            if file not in self.servers:
                path = [str(Path(file).parent), *sys.path]
                self.servers[file] = ForkServer(
                    preload=[CHILDREN, file], landlock=False, syscalls=False, path=path
                )
        limits = Limits(wall=seconds, cpu=math.ceil(seconds), memory=8 << 30)
        found = self.servers[file].call(f"{CHILDREN}:call_user", file, name, arguments, limits=limits)
        if found.kind not in ("ok", "timeout"):
            raise Failed(found.text, found.value or "")
        late = {"value": 0.0, "status": "timeout", "detail": found.text}
        values = found.value if found.kind == "ok" else [late] * len(arguments.get("completions", [0]))
        scores = [rebuilt(v) if isinstance(v, dict) and "value" in v else v for v in values]
        return scores[0] if reward.per_sample else scores

    def failed(self, reward: Reward, problem: Problem, error: BaseException) -> Score:
        """What a completion gets whose reward function raised or hung; the first time it is shown."""
        words = what(reward, error)
        if reward.name not in self.shown:
            self.shown.add(reward.name)
            late = isinstance(error, TimeoutError)  # where it was waited for says nothing
            trace = error.trace if isinstance(error, Failed) else "" if late else trace_of(error)
            print(f"reward {reward.name} on problem {problem.id} failed: {words}\n{trace}", file=sys.stderr)
        return Score(None, "infra_error", detail=words[:300])

    def settle(
        self,
        reward: Reward,
        problem: Problem,
        call: tuple[Task, Callable[[], None]],
        count: int,
        strict: bool = False,
    ) -> list[Score]:
        """Wait for a call's verdicts. Raises RewardError; ``strict``: also if the function raised."""
        task, relieve = call
        try:
            returned = task.wait(relieve)
        except CoveyError:
            raise  # a user's mistake, not a failure of what judges
        except Exception as error:
            if strict:
                raise reward.broken(problem, what(reward, error)) from error
            return [self.failed(reward, problem, error)] * count
        return returned if reward.place == "worker" else reward.scores(problem, returned, count)

    def ask(self, reward: Reward, problem: Problem, text: str) -> Score:
        """What one function gives for a text, its gate left aside. Raises RewardError."""
        tokens, logprobs = np.zeros(1, np.int64), np.zeros(1, np.float32)
        call = self.submit(reward, problem, [Completion(tokens, logprobs, text, "stop")])
        (score,) = self.settle(reward, problem, call, 1)
        return score

    def take_logged(self) -> dict[str, list[float]]:
        """What was logged since the last time."""
        taken = dict(self.logged)
        self.logged.clear()
        return taken

    def end_step(self, groups: Sequence[Group]) -> None:
        """Stop a run whose judging fails too often. Raises RewardError."""
        scores = [s for g in groups for function in g.scores.values() for s in function]
        failures = [s for s in scores if s.status == "infra_error"]
        self.recent.append((len(failures), len(scores)))
        failed, total = (sum(column) for column in zip(*self.recent, strict=True))
        full = len(self.recent) == self.recent.maxlen
        if failures and (len(failures) == len(scores) or (full and failed > self.max_infra * total)):
            raise RewardError(
                f"{failed} of {total} scores of the last {len(self.recent)} steps could not be made "
                f"(scoring.max_infra {self.max_infra:g}); the last one: {failures[-1].detail or '?'}"
            )


def what(reward: Reward, error: BaseException) -> str:
    """What went wrong in a call, for people."""
    if isinstance(error, Failed):
        return str(error)  # it was put into words where it happened
    return described(error, reward.file)


class Pending:
    """A group that is being judged."""

    def __init__(
        self, rewards: Rewards, problem: Problem, prompt: np.ndarray, size: int, strict: bool = False
    ) -> None:
        self.rewards, self.problem, self.prompt, self.size = rewards, problem, prompt, size
        self.strict = strict
        self.completions: dict[int, Completion] = {}
        self.calls: list[Call] = []

    @classmethod
    def of_text(cls, rewards: Rewards, problem: Problem, text: str) -> Pending:
        """A completion alone, of which only the text is known."""
        tokens, logprobs = np.zeros(0, np.int64), np.zeros(0, np.float32)
        pending = cls(rewards, problem, tokens, 1)
        pending.add(0, Completion(tokens, logprobs, text, "stop"))
        return pending

    def add(self, sample: int, completion: Completion) -> None:
        """A completion has ended."""
        self.completions[sample] = completion
        complete = len(self.completions) == self.size
        for reward in self.rewards:
            if reward.per_sample:
                self._submit(reward, [sample])
            elif complete:
                self._submit(reward, range(self.size))

    def _submit(self, reward: Reward, samples: Sequence[int]) -> None:
        call = self.rewards.submit(reward, self.problem, [self.completions[s] for s in samples])
        self.calls.append((reward, samples, call))
        self.rewards.calls += 1
        self.rewards.judged += len(samples)

    def group(self) -> Group:
        """Wait for all verdicts. Raises RewardError."""
        found: dict[str, list[Score]] = {r.name: [Score(None)] * self.size for r in self.rewards}
        for reward, samples, call in self.calls:
            scores = self.rewards.settle(reward, self.problem, call, len(samples), self.strict)
            for sample, score in zip(samples, scores, strict=True):
                found[reward.name][sample] = score
        completions = tuple(self.completions[s] for s in range(self.size))
        return assemble(self.problem, self.prompt, completions, self.rewards, found)


def verdict_of(rewards: Sequence[Reward]) -> Reward:
    """The reward that decides which completions are correct, whatever the order they stand in.

    The one declared with `verdict: true`, a single reward, or the only one that may be it.
    """
    declared = [r for r in rewards if r.verdict]
    found = declared or (list(rewards) if len(rewards) == 1 else [r for r in rewards if r.may_be_verdict])
    if len(found) == 1:
        return found[0]
    undecided = sorted(found or rewards, key=lambda r: (not r.options.verdict, r.name))
    names = [r.name for r in undecided]
    line = getattr(undecided[0].function, "__covey_name__", names[0])
    wrong = "each says `verdict: true`." if declared else "which of them says whether an answer is correct?"
    raise ConfigError(
        f"rewards: {', '.join(names)}: {wrong} Accuracy, filters, the curriculum and the verdict on the run "
        f"follow one reward: mark it, as in `rewards: [{{{line}: {{verdict: true}}}}, ...]`"
        + ("" if declared or len(found) < 2 else ", or mark the others with `verdict: false`")
    )


def assemble(
    problem: Problem,
    prompt: np.ndarray,
    completions: Sequence[Completion],
    rewards: Sequence[Reward],
    scores: Mapping[str, Sequence[Score]],
) -> Group:
    """Scores -> a group: gates applied, components, their weighted sum, step rewards."""
    opened = {
        r.name: [r.gated_by is None or _open(r.gated_by, scores, s) for s in range(len(completions))]
        for r in rewards
    }
    components = {
        name: np.array(
            [
                np.nan if s.value is None else s.value * opens
                for s, opens in zip(values, opened[name], strict=True)
            ],
            dtype=np.float64,
        )
        for name, values in scores.items()
    }
    weights = {r.name: r.weight for r in rewards}
    steps = None
    if any(s.steps is not None for values in scores.values() for s in values):
        steps = tuple(
            _steps([(scores[r.name][i], r.weight * opened[r.name][i]) for r in rewards])
            for i in range(len(completions))
        )
    totals = combine(components, weights)
    judged = ~np.isnan(np.stack(list(components.values()))).all(0)
    if not np.isfinite(totals[judged]).all():
        raise RewardError(
            f"rewards {', '.join(weights)} on problem {problem.id}: a value times its weight, or their sum, "
            "is beyond what a number can hold; pay less"
        )
    group = Group(problem, prompt, tuple(completions), totals, components, weights, steps)
    verdict = next((r.name for r in rewards if r.verdict), "")
    return replace(group, verdict=verdict, scores={name: tuple(v) for name, v in scores.items()})


def _steps(given: Sequence[tuple[Score, float]]) -> StepRewards:
    """A completion's step rewards: each function's times its factor, summed where steps end together."""
    ends: dict[int, list[float]] = {}
    for score, factor in given:
        for _, end, value in score.steps or ():
            ends.setdefault(end - 1, []).append(factor * value)
    return StepRewards([math.fsum(ends[end]) for end in sorted(ends)], sorted(ends))


def turned_over(group: Group, rewards: Rewards, streams: Sequence[int]) -> Group:
    """The group as a judge sees it that is wrong about a share ``rewards.noise`` of everything it says.

    A score v in 0..1 becomes 1 - v, others stay; a step's v becomes -v. Each verdict and each step has a
    draw of its own, keyed by the completion's stream (G,) and the reward's name.
    """
    scores = {
        name: [
            _unreliable(s, key(t, "noise", name), rewards.noise) for s, t in zip(own, streams, strict=True)
        ]
        for name, own in group.scores.items()
    }
    return assemble(group.problem, group.prompt, group.completions, rewards, scores)


def _unreliable(score: Score, stream: int, noise: float) -> Score:
    if score.value is None:
        return score
    steps = score.steps or ()
    verdict, *turned = (uniforms(stream, 1 + len(steps)) < noise).tolist()
    verdict &= 0 <= score.value <= 1
    signs = [-1 if turn else 1 for turn in turned]
    return replace(
        score,
        value=1 - score.value if verdict else score.value,
        steps=score.steps and tuple((a, b, sign * v) for (a, b, v), sign in zip(steps, signs, strict=True)),
        parts={**score.parts, "turned_over": float(np.mean([verdict, *turned]))},
    )


def _open(gate: str, scores: Mapping[str, Sequence[Score]], sample: int) -> bool:
    """Whether the gating reward found an answer, a right one or a wrong one."""
    name, _, verdict = gate.partition(":")
    score = scores[name][sample]
    if score.value is None:
        return False
    return (score.value > 0.5) == (verdict == "right") if verdict else score.status in ANSWERED


def combine(components: Mapping[str, np.ndarray], weights: Mapping[str, float]) -> np.ndarray:
    """Weighted sum of what applies; NaN where nothing does. name -> (G,) to (G,) float64.

    Rounded once, so that the order of the rewards changes no bit.
    """
    with np.errstate(over="ignore"):
        values = np.stack([weights[name] * value for name, value in components.items()])
    return np.array([_total(column[~np.isnan(column)].tolist()) for column in values.T])


def _total(values: Sequence[float]) -> float:
    """Infinite where the sum is beyond what a number can hold."""
    try:
        return math.fsum(values) if values else math.nan
    except (OverflowError, ValueError):
        return math.inf
