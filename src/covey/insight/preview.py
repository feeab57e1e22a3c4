"""Groups measured before a run, and the chance to learn, the time and the memory that follow from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from covey.config.load import ResolvedConfig
from covey.insight.answers import PromptForm, Readings
from covey.insight.forecast import Forecast, Workload, evaluations_of, pace_at, sampled_at_once
from covey.insight.gpus import GpuMemory
from covey.insight.odds import Counts, dead_share, reward_counts
from covey.objective.diagnostics import sampled_entropy
from covey.objective.texts import text_metrics
from covey.rewards.scorer import ScoringStats
from covey.runs.estimates import Estimate, wilson
from covey.system.text import percent
from covey.types import Completion, Group

MAX_DEAD = 0.5
"""Fraction of dead groups above which more than half of the sampling is wasted."""
FEW_LIVE = 2.0
"""Least number of live groups in a step: with fewer, its gradient is the accident of one problem."""
MAX_UNFINISHED = 0.5
"""Fraction of unfinished completions above which the finished ones prove nothing."""
MANY_TRUNCATED = 0.1
"""Fraction of truncated completions above which it matters what would have become of them."""
Promise = Literal["yes", "barely", "no", "unknown"]


@dataclass(frozen=True)
class SampledGroups:
    """Groups that were sampled and scored, and the seconds that this took."""

    groups: Sequence[Group]
    seconds: float
    """As the run takes them, which samples so many completions at once as a step has."""
    requested: int
    """Number of groups that were requested."""
    scoring: ScoringStats
    stopped: bool = False
    """Whether the user stopped before all groups were sampled; then nothing below is known."""
    paces: Mapping[int, float] = field(default_factory=dict)
    """Seconds per token by the number of completions that were sampled at once."""
    limit: int | None = None
    """Tokens of the longest completion, if there was no time for ``rollout.max_tokens``."""
    by_time: bool = False
    """Whether the number of groups is what the time allowed."""


class UpdateTiming(NamedTuple):
    """The time of an update."""

    prepare_seconds: float
    """Seconds until the batch has all that its loss reads."""
    update_seconds: float
    """Seconds of the gradients."""
    update_tokens: int
    """Number of tokens that these took through the model, each group's prompt once."""


class ContinuationCost(NamedTuple):
    """The continuations of one completion, if the algorithm samples these."""

    tokens: float
    seconds: float


NO_CONTINUATION = ContinuationCost(0.0, 0.0)


@dataclass(frozen=True)
class Longer:
    """Truncated completions that were continued and scored again, each with its first part."""

    groups: Sequence[Group]
    limit: int
    """Tokens of the longest completion."""
    before: np.ndarray
    """(N,) float64: the reward of each before it was continued."""

    @property
    def completions(self) -> list[Completion]:
        """The continued completions, from their first token."""
        return [c for g in self.groups for c in g.completions]

    @property
    def reward(self) -> float:
        """The mean reward of the continued completions."""
        return float(np.nan_to_num(np.concatenate([g.rewards for g in self.groups])).mean())

    def outcome(self) -> dict[str, int]:
        """Count the completions: all, ended, correct, and with a higher reward than before."""
        rewards = np.concatenate([g.rewards for g in self.groups])
        return {
            "completions": len(rewards),
            "ended": sum(c.finish == "stop" for c in self.completions),
            "correct": int(sum(g.correct.sum() for g in self.groups)),
            "earn_more": int((np.nan_to_num(rewards) > np.nan_to_num(self.before)).sum()),
        }


@dataclass(frozen=True)
class Preview:
    """The measurement and the conclusions from it."""

    stage: ResolvedConfig
    samples: SampledGroups
    memory: Mapping[str, int]
    """Forecast bytes, by component."""
    memory_available: int
    """Bytes that this device has for the run."""
    held_out: int
    """Number of problems to evaluate on."""
    problems: int
    """Number of problems to train on."""
    reward_seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds per completion, by reward."""
    update: UpdateTiming | None = None
    continuation: ContinuationCost = NO_CONTINUATION
    others: Mapping[float, Sequence[Group]] = field(default_factory=dict)
    """Temperature -> groups of the same problems."""
    gpus: Sequence[GpuMemory] = ()
    """The memory of the run on GPUs that are not at hand."""
    longer: Longer | None = None
    """Truncated completions that were continued; None if none was."""
    readings: Readings | None = None
    """The rejected completions that would be paid in another form; None if they were not looked for."""
    wording: PromptForm | None = None
    """The form in which the model gets its prompts."""

    @cached_property
    def counts(self) -> list[Counts]:
        """The number of times that each reward occurred, by problem."""
        return [reward_counts(g) for g in self.samples.groups]

    @cached_property
    def lengths(self) -> np.ndarray:
        """(N,) tokens of every completion."""
        return np.array([len(c.tokens) for g in self.samples.groups for c in g.completions])

    @cached_property
    def truncated(self) -> np.ndarray:
        """(N,) bool: whether each completion was truncated."""
        return np.array([c.finish == "length" for g in self.samples.groups for c in g.completions])

    @cached_property
    def rewards(self) -> np.ndarray:
        """(N,) float64: the reward of each completion, NaN without one."""
        return np.concatenate([g.rewards for g in self.samples.groups])

    @property
    def ended(self) -> np.ndarray:
        """Tokens of each completion that was not truncated."""
        return self.lengths[~self.truncated]

    @property
    def speed(self) -> float:
        """Sampled tokens per second, with rewards and prompts included."""
        return float(self.lengths.sum() / self.samples.seconds)

    @property
    def copies(self) -> float:
        """Fraction of the completions that are copies of another."""
        texts = [c.text for g in self.samples.groups for c in g.completions]
        return text_metrics(texts, np.zeros(len(texts), bool))["text/duplicates"]

    @property
    def unfinished(self) -> bool:
        """Whether most completions could not be awaited, so that their rewards mean nothing."""
        return self.samples.limit is not None and float(self.truncated.mean()) > MAX_UNFINISHED

    @cached_property
    def length(self) -> float:
        """Mean tokens of a completion; an unfinished completion counts as ``rollout.max_tokens``."""
        if self.samples.limit is None:
            return float(self.lengths.mean())
        return float(np.where(self.truncated, self.stage.config.rollout.max_tokens, self.lengths).mean())

    def dead(self, size: int) -> Estimate:
        """Return the fraction of groups of this size that would be dead."""
        return dead_share(self.counts, size)

    @property
    def group_size(self) -> int:
        """The config's group size."""
        return self.stage.config.rollout.group_size

    @cached_property
    def promise(self) -> Promise:
        """Whether there is something to learn from."""
        if self.unfinished:
            return "unknown"
        if all(g.dead for g in self.samples.groups):
            return "no"
        live = 1 - self.dead(self.group_size).value
        enough = self.stage.config.rollout.prompts_per_step * live >= FEW_LIVE
        return "yes" if enough and live >= 1 - MAX_DEAD else "barely"

    @cached_property
    def work(self) -> Workload:
        """The work of a training step."""
        # Groups that have not ended are not known to be dead.
        dead = 0.0 if self.unfinished else self.dead(self.group_size).value
        return Workload.of(self.stage.config, self.stage.algorithm, dead, self.length)

    def forecast(self) -> Forecast | None:
        """Forecast seconds, hours and memory; None if the update was not timed."""
        samples = self.samples
        update = self.update
        config = self.stage.config
        work = self.work
        if update is None or not update.update_tokens:
            return None
        # With rewards and prompts included.
        seconds_per_token = samples.seconds / max(self.lengths.sum(), 1)
        count, completions = evaluations_of(config, self.held_out)
        evaluated_per_token = seconds_per_token
        if samples.paces and completions:
            evaluated_per_token = pace_at(samples.paces, sampled_at_once(config, completions))
        prompt = float(np.mean([len(g.prompt) for g in samples.groups]))
        update_tokens = work.trained * (work.length + prompt / self.group_size)
        # The work of a step's updates, in units of the update that was measured.
        updates = update_tokens / update.update_tokens
        continued = work.completions * self.continuation.tokens
        prepass = self.problems * config.rollout.prepass * work.length
        return Forecast(
            rollout=work.completions * (work.length * seconds_per_token + self.continuation.seconds),
            update=(update.prepare_seconds + update.update_seconds) * updates,
            evaluation=completions * work.length * evaluated_per_token,
            steps=config.train.steps,
            evaluations=count,
            tokens=config.train.steps * (work.completions * work.length + continued) + prepass,
            prepass=prepass * seconds_per_token,
            continued=config.train.steps * continued,
            memory=self.memory,
            memory_available=self.memory_available,
        )

    def pass_rate(self) -> Estimate:
        """Estimate the pass rate."""
        return pass_rate(self.samples.groups)

    def at(self, temperature: float) -> tuple[Estimate, Estimate, str]:
        """Return pass rate, fraction of dead groups and other facts in words at another temperature."""
        groups = self.others[temperature]
        ended = np.mean([c.finish == "stop" for g in groups for c in g.completions])
        facts = f"{percent(1 - float(ended))} truncated, entropy {sampled_entropy(groups):.2f}"
        return pass_rate(groups), dead_share([reward_counts(g) for g in groups], self.group_size), facts


def pass_rate(groups: Sequence[Group]) -> Estimate:
    """Estimate the pass rate with a Wilson interval over problems, which has a width even at 0 and 1."""
    rates = [g.pass_rate for g in groups if g.verdict_mask.any()]
    return wilson(float(np.sum(rates)), len(rates))
