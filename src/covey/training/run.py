"""A run: everything the training loops work with, built from a config and kept in a run folder."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from covey.config.load import Loaded
from covey.console import RunConsole
from covey.errors import CheckpointError, OutOfRoom, disk_error, system_error
from covey.estimates import Evaluation
from covey.evaluation import evaluate
from covey.fault_injection import Faults
from covey.integrity import read_record, sealed
from covey.models.load import Reference, save_policy
from covey.models.policy import Policy
from covey.objective.algorithms import Algorithm
from covey.rewards.base import Rewards
from covey.rollout import Prompted, sampling_params
from covey.runs.atomic import committed_folder
from covey.runs.folder import Logged, RunFolder
from covey.sampling.base import Sampler
from covey.signals import StopSignal
from covey.training.clock import Clock
from covey.training.guards import check_weights, free_for_save
from covey.training.optimizer import Optimizer
from covey.training.watchdog import Watchdog


@dataclass
class State:
    """What a checkpoint holds beside weights and optimizer; the rest follows from the config."""

    step: int = 0
    cursor: int = 0
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    seconds: float = 0.0
    difficulty: dict[str, Any] = field(default_factory=dict)
    updates: int = 0
    """Optimizer steps that were applied."""
    bad_updates: int = 0
    """In a row, skipped because they were not finite."""
    dead_steps: int = 0
    """In a row, without any advantage."""
    micro_tokens: int = 0
    """What was left of the planned tokens when memory ran out; 0: it never did."""
    kl_level: int = 0
    """How many of the KL guard's bounds the last step was above."""
    unjudged: list[tuple[int, int]] = field(default_factory=list)
    """Of the last steps: scores that could not be made, and all scores (``Rewards.recent``)."""
    refused: dict[str, int] = field(default_factory=dict)
    """How often in a row each reward refused a completion known to be right (``Rewards.refused``)."""


@dataclass(frozen=True)
class Saved:
    """`trainer.json` of a checkpoint."""

    state: State
    logged: Logged


@dataclass(frozen=True)
class Session:
    """How a command wants its runs done, beside what the config says."""

    strict: bool = False
    """Refuse anything but an exact continuation."""
    changes: bool = False
    """Let settings be changed that end the exactness of a resumed run."""
    start: Mapping[str, Any] = field(default_factory=dict)
    """What `covey resume` needs to give the same command again: config and settings."""
    home: Path = Path()
    """The whole run's folder, where that is kept; stages have theirs inside."""
    faults: Faults = field(default_factory=Faults)


@dataclass
class Run:
    """One stage at work."""

    loaded: Loaded
    folder: RunFolder
    console: RunConsole
    stop: StopSignal
    policy: Policy
    reference: Reference | None
    sampler: Sampler
    rewards: Rewards
    train_set: list[Prompted]
    test_set: list[Prompted]
    optimizer: Optimizer
    watchdog: Watchdog
    session: Session = field(default_factory=Session)
    state: State = field(default_factory=State)
    planned_tokens: int = 0
    """tokens_per_micro_batch, or what of it the memory forecast has room for."""
    clock: Clock = field(default_factory=Clock)

    @property
    def algorithm(self) -> Algorithm:
        """How rewards become a gradient."""
        return self.loaded.algorithm

    @property
    def faults(self) -> Faults:
        """Failures on purpose."""
        return self.session.faults

    @property
    def micro_tokens(self) -> int:
        """Tokens in the model at once."""
        return min(self.state.micro_tokens or self.planned_tokens, self.planned_tokens)

    def on_sample(self, done: int, total: int, what: str = "sampling") -> None:
        """Progress of sampling; a stop request takes effect here, where nothing is half done."""
        self.watchdog.progress()
        self.stop.check()
        self.console.sampling(done, total, what)

    def on_fewer(self, running: int) -> None:
        """Sampling ran out of memory and goes on with so many completions at once."""
        self.console.fewer_running(running)
        self.event(self.state.step, "out of memory", running=running)

    def on_micro_batch(self) -> None:
        """A micro-batch is about to go through a model."""
        self.watchdog.progress()
        self.faults.in_memory("memory.full")

    def evaluate(self) -> Evaluation:
        """Held-out accuracy now, logged once for every step it is taken at."""
        config = self.loaded.config
        with self.clock("eval"):
            result = evaluate(
                self.test_set[: config.eval.problems],
                self.sampler,
                self.rewards,
                sampling_params(config.rollout),
                config.eval.samples,
                config.seed,
                partial(self.on_sample, what="evaluating"),
            )
        self.folder.append("evals.jsonl", {"step": self.state.step, **result.record()})
        return result

    def first_evaluation(self) -> Evaluation:
        """Held-out accuracy before the first step, measured now or found in the log of an earlier try."""
        records = [r for r in self.folder.read("evals.jsonl") if r["step"] == 0]
        if records:
            return Evaluation.from_record(records[0])
        self.console.doing("evaluating")
        return self.evaluate()

    def log(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Write what follows from the config alone, and apart from it the times; returns these."""
        times = self.clock.lap()
        self.folder.append("metrics.jsonl", {"step": step, **metrics})
        self.folder.append("timings.jsonl", {"step": step, **times})
        return times

    def event(self, step: int, what: str, **details: Any) -> None:
        """Note something out of the ordinary."""
        self.folder.append("events.jsonl", {"step": step, "event": what, **details})

    def save(self) -> None:
        """Commit a checkpoint: a model folder with the trainer's state beside it.

        Raises GuardStop if a weight is not finite, OutOfRoom if it cannot be written; either leaves
        the checkpoints there were, in the worst case the newest one only.
        """
        target = self.folder.path / "checkpoints" / f"step_{self.state.step:06d}"
        if target.exists():
            return
        self.console.doing("saving")
        check_weights(self.policy, str(target))
        self.state.seconds = self.clock.total()
        keep = self.loaded.config.train.keep
        try:
            self._write_checkpoint(target)
        except OutOfRoom:
            if len(self.folder.checkpoints()) < 2:
                raise
            self.folder.rotate(1)
            self._write_checkpoint(target)
        self.folder.rotate(keep)

    def _write_checkpoint(self, target: Path) -> None:
        free_for_save(self, 0 if self.faults.hit("save.full") else shutil.disk_usage(target.parent).free)
        try:
            with self.clock("save"), committed_folder(target) as folder:
                save_policy(self.policy, folder, merged=False)
                save_file(self.optimizer.state(), folder / "optimizer.safetensors")
                self.faults.in_save()
                if self.reference is not None and self.algorithm.moves_reference:
                    save_file(self.reference.state(), folder / "reference.safetensors")
                saved = Saved(self.state, self.folder.sync())
                (folder / "trainer.json").write_text(sealed(asdict(saved)))
        except Exception as error:
            if (system := system_error(error)) is None:
                raise
            raise disk_error(system, f"{target} could not be written") from None

    def advance(self, step: int, **changes: Any) -> None:
        """A step is complete: from here on a resume goes on after it."""
        self.watchdog.progress()
        changes |= {"unjudged": list(self.rewards.recent), "refused": dict(self.rewards.refused)}
        self.state = replace(self.state, step=step, **changes)
        if why := self.console.lost_output():
            self.event(step, "output lost", because=why)

    def housekeeping(self) -> bool:
        """Evaluate and save when it is time; True once the stage has reached its goal.

        Called again at the same step it does what a stop has left undone.
        """
        train, every = self.loaded.config.train, self.loaded.config.eval.every
        done = self.state.step >= train.steps
        if every and self.state.step % every == 0 and not done:
            known = [r for r in self.folder.read("evals.jsonl") if r["step"] == self.state.step]
            if not known:
                self.console.doing("evaluating")
            result = Evaluation.from_record(known[0]) if known else self.evaluate()
            accuracy = result.summary()["pass@1"].value
            if train.stop_at is not None and accuracy >= train.stop_at:
                return True
        if self.state.step % train.save_every == 0 and not done:
            self.save()
        return False

    def restore(self) -> bool:
        """Go back to the newest good checkpoint; False where there is none.

        Raises CheckpointError if there are only damaged ones or, in a strict session, any.
        """
        checkpoint, complaints = self.folder.latest_checkpoint()
        if complaints and (self.session.strict or checkpoint is None):
            raise CheckpointError(
                f"{'; '.join(complaints)}. Put the files back"
                + (
                    ", or leave out --strict to go on from the checkpoint before"
                    if checkpoint is not None
                    else ", or remove the run folder to begin again: there is no other checkpoint"
                )
            )
        for complaint in complaints:
            self.console.say(f"checkpoint passed over: {complaint}", "yellow")
        saved = Saved(self.state, Logged())
        if checkpoint is not None:
            remedy = "Remove this checkpoint to go on from the one before"
            saved = read_record(checkpoint / "trainer.json", Saved, remedy)
            self.policy.load_weights(checkpoint)
            self.optimizer.load(load_file(checkpoint / "optimizer.safetensors"))
            if self.reference is not None and self.algorithm.moves_reference:
                self.reference.load(load_file(checkpoint / "reference.safetensors"))
        self.state = saved.state
        self.sampler.version = self.state.updates
        self.clock.before = self.state.seconds
        self.rewards.recent.extend(self.state.unjudged)
        self.rewards.refused.update(self.state.refused)
        self._rewind(saved.logged)
        return checkpoint is not None

    def _rewind(self, logged: Logged) -> None:
        """Forget what was logged later. Raises CheckpointError for damage, in a strict session for any."""
        complaints = self.folder.damaged(logged, self.state.step)
        if complaints and self.session.strict:
            raise CheckpointError(f"{'; '.join(complaints)}. Put the files back, or leave out --strict")
        if lost := self.folder.rewind(logged, self.state.step):
            complaints.append(f"{self.folder.path / 'rollouts'} lacks {lost} of {logged.rollouts} files")
        for complaint in complaints:
            self.console.say(complaint, "yellow")
        if complaints:
            self.event(self.state.step, "log damaged", because=complaints)
