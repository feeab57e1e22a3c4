"""The journal of a run: write its logs, show its progress, and pass its metrics to a tracker."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from covey.learner.batching import Batch, by_completion
from covey.rollouts.batch import RolloutBatch
from covey.runs.clock import Clock
from covey.runs.estimates import Evaluation
from covey.runs.folder import RunFolder
from covey.runs.trackers import Tracking, tracker_opener
from covey.system.console import RunConsole

SKIPPED = "skipped"
"""Folder for the batches of skipped updates."""


@dataclass
class Journal:
    """The streams of a run folder, the console and the clock."""

    folder: RunFolder
    console: RunConsole
    clock: Clock
    tracking: Tracking | None = None

    def say(self, text: str, style: str = "") -> None:
        """Print a line on the console that stays."""
        self.console.say(text, style)

    def log_event(self, step: int, what: str, **details: object) -> None:
        """Log an unusual event."""
        self.folder.append("events.jsonl", {"step": step, "event": what, **details})

    def has_event(self, what: str) -> bool:
        """Whether the run has logged this event before, resumes included."""
        return any(e["event"] == what for e in self.folder.read("events.jsonl"))

    def log_evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Log an evaluation, show it, and pass it on."""
        record = evaluation.record()
        self.folder.append("evals.jsonl", {"step": step, **record})
        self.console.add_accuracy(step, float(evaluation.pass_rate.mean()))
        self.track(step, {f"held_out/{name}": e.value for name, e in evaluation.summary().items()})

    def track(self, step: int, values: Mapping[str, float]) -> None:
        """Send a copy to the tracker, if there is one."""
        if self.tracking is not None:
            self.tracking.log(step, values)

    def track_by(self, name: str | None, settings: Mapping[str, object], first: int) -> None:
        """Send copies of the metrics to a tracker. If it fails, the run says so once and continues."""
        if name is None or not self.folder.writes:
            return

        def log_failure(why: str) -> None:
            self.say(
                f"tracker {name} stopped receiving metrics ({why}); {self.folder.path} has them all", "yellow"
            )
            self.log_event(first, "tracker failed", tracker=name, because=why)

        self.tracking = Tracking(lambda: tracker_opener(name)(self.folder.path, settings, first), log_failure)

    def close(self) -> None:
        """Let the tracker write its last records, and release the folder."""
        if self.tracking is not None:
            self.tracking.close()
        self.folder.close()

    def log(self, step: int, metrics: Mapping[str, float], memory: Mapping[str, int]) -> dict[str, float]:
        """Log the metrics, which the config determines, and in another stream the times; return the times.

        ``memory``: bytes of tensors by purpose.
        """
        times = self.clock.lap(memory)
        self.folder.append("metrics.jsonl", {"step": step, **metrics})
        self.folder.append("timings.jsonl", {"step": step, **times})
        self.track(step, {**metrics, **times})
        return times

    def log_rollouts(
        self,
        step: int,
        rollout_batch: RolloutBatch,
        batch: Batch,
        per_token: Mapping[str, np.ndarray],
        epochs: int,
    ) -> None:
        """Log a step's completions, and what updates saw of their tokens."""
        advantages = by_completion(batch, batch.advantages)
        values = {}
        if batch.value_targets is not None:
            values["values"] = np.concatenate(by_completion(batch, batch.value_targets.values))
        self.log_completions(step, rollout_batch, advantages, {**values, **per_token})
        self.clock.count("update", int(batch.mask.sum()) * epochs)

    def log_completions(
        self,
        step: int,
        rollout_batch: RolloutBatch,
        advantages: Sequence[np.ndarray],
        per_token: Mapping[str, np.ndarray] = MappingProxyType({}),
    ) -> None:
        """Log a step's completions, and the time and tokens that they took."""
        self.folder.write_rollouts(step, rollout_batch.groups, advantages, rollout_batch.filtered, per_token)
        self.clock.add("reward", rollout_batch.scoring.waited)
        if rollout_batch.tool_seconds is not None:
            self.clock.add("tools", rollout_batch.tool_seconds)
        self.clock.count("rollout", sum(c.length for g in rollout_batch.all_groups for c in g.completions))

    def save_skipped_update(self, name: str, batch: Batch, record: Mapping[str, object]) -> None:
        """Save a batch whose gradient is not finite, so that somebody can look into it."""
        if not self.folder.writes:
            return
        folder = self.folder.path / SKIPPED
        folder.mkdir(exist_ok=True)
        parts = {**vars(batch)}
        # Prefixed: the log-probs of a batch are ``old_logprobs`` as well.
        if batch.old_distribution is not None:
            parts |= {f"old_{name}": v for name, v in batch.old_distribution._asdict().items()}
        if batch.value_targets is not None:
            parts |= batch.value_targets._asdict()
        tensors = {name: v.clone() for name, v in parts.items() if isinstance(v, Tensor)}
        for i, (prompt, tokens) in enumerate(zip(batch.prompts, batch.tokens, strict=True)):
            tensors |= {f"prompt.{i}": torch.tensor(prompt), f"tokens.{i}": torch.tensor(tokens)}
        for i, mask in enumerate(batch.sampling_masks or ()):
            tensors |= {f"kept_ids.{i}": torch.tensor(mask.ids), f"kept_ends.{i}": torch.tensor(mask.ends)}
        save_file(tensors, folder / f"{name}.safetensors")
        (folder / f"{name}.json").write_text(json.dumps(record, indent=1))
