"""A run: everything the training loops work with, built from a config and kept in a run folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from covey.config.load import Loaded
from covey.console import RunConsole
from covey.evaluate import Evaluation, evaluate
from covey.models.load import Reference, save_policy
from covey.models.policy import Policy
from covey.objective.algorithms import Algorithm
from covey.rewards.base import Rewards
from covey.rollout import Prompted, sampling_params
from covey.sampling.base import Sampler
from covey.stopping import StopSignal
from covey.store.commit import committed_folder
from covey.store.folder import RunFolder
from covey.training.clock import Clock
from covey.training.optimizer import Optimizer


@dataclass
class State:
    """What a checkpoint holds beside weights and optimizer; the rest follows from the config."""

    step: int = 0
    cursor: int = 0
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    seconds: float = 0.0
    difficulty: dict[str, Any] = field(default_factory=dict)


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
    state: State = field(default_factory=State)
    clock: Clock = field(default_factory=Clock)

    @property
    def algorithm(self) -> Algorithm:
        """How rewards become a gradient."""
        return self.loaded.algorithm

    def on_sample(self, done: int, total: int) -> None:
        """Progress of sampling; a stop request takes effect here, where nothing is half done."""
        self.stop.check()
        self.console.sampling(done, total)

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
                self.on_sample,
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

    def save(self) -> Path:
        """Commit a checkpoint: a model folder with the trainer's state beside it."""
        self.state.seconds = self.clock.total()
        target = self.folder.path / "checkpoints" / f"step_{self.state.step:06d}"
        if not target.exists():
            with self.clock("save"), committed_folder(target) as folder:
                save_policy(self.policy, folder, merged=False)
                save_file(self.optimizer.state(), folder / "optimizer.safetensors")
                if self.reference is not None and self.algorithm.moves_reference:
                    save_file(self.reference.state(), folder / "reference.safetensors")
                state = {"state": asdict(self.state), "streams": self.folder.sizes()}
                (folder / "trainer.json").write_text(json.dumps(state, indent=1))
            self.folder.rotate(self.loaded.config.train.keep)
        return target

    def advance(self, step: int, **changes: Any) -> None:
        """A step is complete: from here on a resume goes on after it."""
        self.state = replace(self.state, step=step, **changes)

    def housekeeping(self) -> bool:
        """Evaluate and save when it is time; True once the stage has reached its goal."""
        train, every = self.loaded.config.train, self.loaded.config.eval.every
        done = self.state.step >= train.steps
        if every and self.state.step % every == 0 and not done:
            self.console.doing("evaluating")
            accuracy = self.evaluate().summary()["pass@1"].value
            if train.stop_at is not None and accuracy >= train.stop_at:
                return True
        if self.state.step % train.save_every == 0 and not done:
            self.save()
        return False

    def restore(self) -> bool:
        """Go back to the newest good checkpoint; False where there is none."""
        checkpoint, complaints = self.folder.latest_checkpoint()
        for complaint in complaints:
            self.console.say(f"checkpoint passed over: {complaint}", "yellow")
        saved: dict[str, Any] = {"state": {}, "streams": {}}
        if checkpoint is not None:
            saved = json.loads((checkpoint / "trainer.json").read_text())
            self.policy.load_weights(checkpoint)
            self.optimizer.load(load_file(checkpoint / "optimizer.safetensors"))
            if self.reference is not None and self.algorithm.moves_reference:
                self.reference.load(load_file(checkpoint / "reference.safetensors"))
        self.state = replace(self.state, **saved["state"])
        self.clock.before = self.state.seconds
        self.folder.rewind(saved["streams"], self.state.step)
        return checkpoint is not None
