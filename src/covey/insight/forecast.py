"""Forecast of the time and memory of a run, from the work of a step and the measured speed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

import numpy as np

from covey.config.schema import Config
from covey.objective.algorithms import Algorithm
from covey.rollouts.segments import Continuations, expected_continuations
from covey.system.text import duration, percent

NONE = Continuations()


@dataclass(frozen=True)
class Workload:
    """The average work of a training step."""

    completions: float
    """Number of sampled completions, including groups that a filter then leaves out."""
    trained: float
    """Number of completions that go through the update, times ``train.inner_epochs``."""
    length: float
    """Mean tokens of a completion."""
    continued: Continuations = NONE

    @property
    def tokens(self) -> float:
        """Number of generated tokens."""
        return self.completions * (self.length + self.continued.tokens)

    @classmethod
    def of(cls, config: Config, algorithm: Algorithm, dead: float, length: float) -> Workload:
        """Compute the work, given the fraction ``dead`` of groups and the mean ``length`` of a completion.

        A filter replaces dead groups in a limited number of rounds: with P prompts, R further rounds and a
        fraction d of dead groups, P (1 + d + ... + d^R) groups are sampled and P (1 - d^(R+1)) are kept. The
        further completions of an estimator count too: greedy ones and continuations
        (``expected_continuations``).
        """
        rollout = config.rollout
        rounds = config.rollout.max_resampling_rounds + 1
        sampled = rollout.completions_per_step
        live = 1 - dead if algorithm.skips_idle else 1.0
        total = float(sampled)
        trained = sampled * live
        continued = expected_continuations(algorithm, rollout.max_tokens, length)
        if algorithm.filter is not None:
            total = sampled * sum(dead**n for n in range(rounds))
            trained = sampled * (1 - dead**rounds)
        if "greedy_reward" in algorithm.needs:
            total += total / rollout.group_size
        return cls(total, trained * config.train.inner_epochs, length, continued)


@dataclass(frozen=True)
class Forecast:
    """The forecast of a run's time and memory."""

    rollout: float
    """Seconds of sampling in a step."""
    update: float
    """Seconds of updates in a step, including their preparation."""
    evaluation: float
    """Seconds of one evaluation, including its greedy pass."""
    steps: int
    evaluations: int
    tokens: float
    """Number of tokens generated in all steps together."""
    continued: float
    """Number of these tokens that belong to continuations."""
    memory: Mapping[str, int]
    """Bytes at the peak, by role."""
    memory_available: int
    """Bytes that the device has for the run."""
    prepass: float = 0.0
    """Seconds before the first step, in which ``rollout.prepass`` measures every problem."""

    @property
    def hours(self) -> float:
        """Hours of the whole run."""
        return (self.prepass + self.steps * self.step + self.evaluations * self.evaluation) / 3600

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return self.rollout + self.update

    def record(self) -> dict[str, object]:
        """Return the forecast as JSON."""
        return asdict(self) | {"hours": self.hours}

    def lines(self) -> Iterator[str]:
        """Yield lines for people."""
        yield (
            f"a step takes about {self.step:,.3g} s: {self.rollout:,.3g} s sampling, {self.update:,.3g} s "
            "updating"
        )
        before = f"{seconds_text(self.prepass)} measuring every problem, " if self.prepass else ""
        evals = ""
        if self.evaluations:
            evals = f" and {self.evaluations} evaluations of {seconds_text(self.evaluation)}"
        continued = ""
        if self.continued:
            continued = f", {percent(self.continued / self.tokens)} of them in continuations"
        yield (
            f"{before}{self.steps:,} steps{evals}: about {seconds_text(3600 * self.hours)}, "
            f"{self.tokens:,.0f} sampled tokens{continued}"
        )
        total = sum(self.memory.values())
        parts = ", ".join(f"{name} {size / 1e6:,.0f}" for name, size in self.memory.items() if size >= 5e5)
        yield f"estimated memory: {total / 1e6:,.0f} of {self.memory_available / 1e6:,.0f} MB ({parts})"
        if total > self.memory_available:
            yield (
                "That does not fit. These need less: train.recompute_layers, lora, optimizer: adamw_8bit, "
                "a smaller train.tokens_per_micro_batch or a smaller rollout.max_running."
            )


def sampled_at_once(config: Config, completions: int) -> int:
    """Return how many of so many completions are sampled at once."""
    return min(completions, config.rollout.max_running)


def pace_at(paces: Mapping[int, float], width: int) -> float:
    """Return the seconds per token of ``width`` completions at once, from those of other widths.

    With B completions a token takes about a / B + b seconds, because B completions read the weights once.
    This also holds beyond the widths that were measured. But more completions never take less time
    together, nor more time each, than fewer.
    """
    widths = sorted(paces, key=lambda measured: 1 / measured)
    nearest = min(widths, key=lambda measured: abs(1 / measured - 1 / width))
    pace = paces[nearest]
    if len(widths) > 1:
        # The two measured widths around this one, or else the two on its side.
        place = int(np.searchsorted([1 / w for w in widths], 1 / width).clip(1, len(widths) - 1))
        wide, narrow = widths[place - 1 : place + 1]
        slope = (paces[narrow] - paces[wide]) / (1 / narrow - 1 / wide)
        pace = paces[wide] + slope * (1 / width - 1 / wide)
    lowest, highest = sorted((paces[nearest], paces[nearest] * nearest / width))
    return min(highest, max(lowest, pace))


def seconds_text(seconds: float) -> str:
    """Return seconds as text for people."""
    return duration(seconds) if seconds >= 10 else f"{seconds:.2g} s"


def evaluations_of(config: Config, held_out: int) -> tuple[int, int]:
    """Return the number of evaluations of a run, and the completions of one."""
    if not held_out:
        return 0, 0
    between = (config.train.steps - 1) // config.eval.every if config.eval.every else 0
    # One before the first step and one after the last; each problem gets its samples and a greedy completion.
    return 2 + between, min(config.eval.problems, held_out) * (config.eval.samples + 1)
