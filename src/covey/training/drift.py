"""The distance of the policy from its start, measured without a reference model.

Some completions of the first step are kept; their log-probs under the first policy were recorded when they
were sampled. The sum of log p(then) - log p(now) over a completion's tokens, averaged over completions, is an
unbiased estimate of KL(first || now). It costs a forward pass over one completion in ``ONE_IN``. With fewer
than ``MIN_COMPLETIONS`` completions it would be noise, so small batches are measured in fewer steps instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil
from pathlib import Path

import numpy as np

from covey.errors import CheckpointError
from covey.learner.batching import Batch, collate
from covey.learner.learner import Learner
from covey.models.policy import Policy
from covey.runs.rollouts import RolloutLog, read_rollouts
from covey.system.processes import on_rank_zero
from covey.types import NO_PROBLEM, Group
from covey_verify.errors import ConfigError

ONE_IN = 32
"""One in this many of the first step's completions is kept, which costs under 1 % of a step's time."""
MAX_FRACTION = 1 / 16
"""Completions computed again per sampled one, averaged over steps; this costs about 2 % of a run's time."""
FIRST_STEPS = 8
"""Number of first steps that are always measured: a learning rate that is too high shows there."""
MIN_COMPLETIONS = 8
MAX_COMPLETIONS = 32


@dataclass
class Drift:
    """Completions of the first step, read from the run folder, so that a resumed run has the same ones."""

    folder: Path
    completions: Batch | None = None

    def metrics(
        self, learner: Learner[Policy], temperature: float, step: int, batch_size: int
    ) -> dict[str, float]:
        """Return `kl/start`, nats per completion; empty without the log of the first step.

        Also empty in some later steps if few completions are sampled per step (``batch_size``).
        """
        self.completions = self.completions or on_rank_zero(lambda: first_completions(self.folder))
        if self.completions is None:
            return {}
        every = ceil(len(self.completions.mask) / (batch_size * MAX_FRACTION))
        if step >= FIRST_STEPS and step % every:
            return {}
        logprobs = learner.token_outputs(self.completions, temperature).logprobs
        moved = (self.completions.sampler_logprobs - logprobs).where(self.completions.mask, 0.0)
        return {"kl/start": float(moved.sum(-1).mean())}


def first_completions(folder: Path) -> Batch | None:
    """Return some completions of a run's first step, spread evenly, or None if they are gone or damaged.

    Raises OSError, with the file's name, if reading fails repeatedly.
    """
    try:
        log = read_rollouts(folder, 1)
        count = min(MAX_COMPLETIONS, max(MIN_COMPLETIONS, len(log.rows) // ONE_IN), len(log.rows))
        chosen = np.unique(np.linspace(0, len(log.rows) - 1, count).astype(int))
        # Completions of a prompt are neighbours, and read it only once.
        chosen_groups = groupby(chosen.tolist(), key=lambda i: log.rows[i]["group"])
        return collate([_group(log, number, list(members)) for number, members in chosen_groups])
    except (CheckpointError, ConfigError):
        return None


def _group(log: RolloutLog, number: int, members: Sequence[int]) -> Group:
    # Problem and rewards do not matter here.
    completions = tuple(log.completion(i) for i in members)
    return Group(NO_PROBLEM, log.prompts[number], completions, np.ones(len(members)))
