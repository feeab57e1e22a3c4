"""A run: one stage in a run folder, with the state that its loop changes. Its parts do not know it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from covey.config.load import ResolvedConfig
from covey.config.methods import EXAMPLE_METHODS
from covey.config.sampling import Rollout
from covey.learner.learner import Learner
from covey.models.policy import Policy
from covey.models.value_head import ValueModel
from covey.objective.algorithms import Algorithm
from covey.rewards.scorer import Rewards
from covey.rollouts.batch import Position, RolloutBatch
from covey.rollouts.loop import Rollouts
from covey.runs.checkpoint import RunState, save_checkpoint
from covey.runs.folder import checkpoint_at
from covey.runs.journal import Journal
from covey.runs.pending import PendingCompletions
from covey.sampling.base import Sampler
from covey.sampling.prompts import EncodedProblem
from covey.system.processes import on_rank_zero
from covey.training.drift import Drift
from covey.training.evaluation import Evaluator
from covey.training.monitor import RunMonitor
from covey.training.observer import ObserverRequest
from covey.training.options import RunOptions
from covey.training.progress import Progress
from covey.training.supervisor import Supervisor

AnyLearner: TypeAlias = Learner[Policy] | Learner[ValueModel]


@dataclass
class Run:
    """A stage's models, data, journal and state, which the training loops work with."""

    resolved: ResolvedConfig
    learner: Learner[Policy]
    sampler: Sampler
    rewards: Rewards
    train_set: list[EncodedProblem]
    test_set: list[EncodedProblem]
    held_out: list[EncodedProblem]
    """Pairs or judged answers that are evaluated, never trained on."""
    contents: Mapping[str, str]
    """Hashes of given rows and the user's functions as the process began."""
    journal: Journal
    monitor: RunMonitor
    options: RunOptions = field(default_factory=RunOptions)
    state: RunState = field(default_factory=RunState)
    critic: Learner[ValueModel] | None = None
    """A separate value network, if the algorithm has one."""
    first_policy: Callable[[], Policy] | None = None
    """Loads the run's first model again; None for a model given as an object."""

    def __post_init__(self) -> None:
        self.supervisor = Supervisor(self.resolved, self.journal)
        self.evaluator = Evaluator(
            self.resolved, self.test_set, self.sampler, self.rewards, self.journal, self.monitor.on_sample
        )
        self.drift = Drift(self.journal.folder.path)

    @property
    def progress(self) -> Progress:
        """The steps made and the time left."""
        return self.monitor.progress

    @property
    def evaluates(self) -> bool:
        """Whether the policy is evaluated: a stage that makes examples leaves it as it is."""
        return bool(self.test_set) and self.resolved.config.method not in EXAMPLE_METHODS

    def begin_step(self) -> None:
        """Note that a step begins, and inject the faults that a test has planned for it."""
        self.progress.step_begins()
        self.options.observer.step_begins(self.state.step)
        self.options.faults.at_step()

    def rollouts(
        self, rollout: Rollout | None = None, algorithm: Algorithm | None = None
    ) -> Generator[RolloutBatch, None, None]:
        """Return the batches of the remaining steps; closing the generator ends a thread that samples ahead.

        ``rollout`` and ``algorithm`` are the config's unless given.
        """
        config = self.resolved.config
        source = Rollouts(
            self.train_set,
            self.sampler,
            self.rewards,
            rollout or config.rollout,
            algorithm or self.resolved.algorithm,
            config.seed,
            config.train.steps,
            PendingCompletions(self.journal.folder.path) if config.rollout.staleness else None,
            first_step=self.state.step,
            position=self.state.position,
            progress=self.monitor.on_sample,
        )
        return source.batches()

    def advance(self, step: int, position: Position | None = None) -> None:
        """Mark a step as complete: a resume begins after it, once its logs are written."""
        self.monitor.watchdog.progress()
        self.progress.logging_begins()
        self.state = replace(self.state, step=step, position=position or Position())
        why = self.journal.console.lost_output()
        if why:
            self.journal.log_event(step, "output lost", because=why)

    def drift_metrics(self, step: int) -> dict[str, float]:
        """Measure how far the policy has moved since the run began."""
        rollout = self.resolved.config.rollout
        with self.journal.clock("drift"):
            return self.drift.metrics(self.learner, rollout.temperature, step, rollout.completions_per_step)

    def seconds_left(self) -> float | None:
        """Estimate the seconds left, evaluations included; None before the first step."""
        every = self.resolved.config.eval.every
        steps = self.resolved.config.train.steps
        step = self.progress.step
        evaluations = (steps - 1) // every - step // every if every and step < steps else 0
        last = step < steps or self.journal.clock.phase != "eval"
        return self.progress.seconds_left(evaluations + last if self.evaluates else 0)

    def end_step(self, metrics: Mapping[str, float]) -> bool:
        """Evaluate and save when it is time, and tell the observer; return True if the stage ends here."""
        reached = self.evaluate_and_save()
        request = self.options.observer.step_ends(self.state.step, metrics) or ObserverRequest()
        if request.save and not on_rank_zero(checkpoint_at(self.journal.folder.path, self.state.step).exists):
            self.save()
        return request.stop or reached

    def evaluate_and_save(self) -> bool:
        """Evaluate and save when it is time; return True once the stage has reached its goal.

        A second call at the same step does only what a stop has left undone.
        """
        train = self.resolved.config.train
        step = self.state.step
        self.progress.step_ends(step)
        # After the last step the end of the run evaluates and saves.
        is_last = step >= train.steps
        if self.evaluates and self.resolved.config.eval.is_due(step) and not is_last:
            evaluation = self.evaluator.at(step)
            second_measurement = bool(self.evaluator.spare_problems)
            if train.stop_at is not None and evaluation.reaches(train.stop_at, second_measurement):
                return True
            # ``on_rank_zero``: the first process alone reads files, and all act on what it found.
            best = on_rank_zero(self.journal.folder.best)
            if best is not None and best.step == step:
                # This checkpoint stays, however much worse the policy gets.
                self.save()
        if not is_last and on_rank_zero(self._save_is_due):
            self.save()
        return False

    def _save_is_due(self) -> bool:
        train = self.resolved.config.train
        late = 0 < train.save_minutes <= self.progress.unsaved_minutes()
        return late or self.state.step % train.save_every == 0

    def save(self) -> None:
        """Commit a checkpoint of the current step. Raises GuardStop or OutOfRoom."""
        journal = self.journal
        train = self.resolved.config.train
        journal.console.show_work("saving")
        micro_tokens = self.monitor.micro_tokens or self.state.micro_tokens
        self.state = replace(self.state, seconds=journal.clock.total(), micro_tokens=micro_tokens)
        with journal.clock("save"):
            faults = self.options.faults
            save_checkpoint(journal.folder, self.learner, self.critic, self.state, train.keep, faults)
        self.progress.checkpoint()
        self.options.observer.checkpoint_written(checkpoint_at(journal.folder.path, self.state.step))
