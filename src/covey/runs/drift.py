"""How far the policy has moved from where it began, watched without a reference model.

Some completions of the first step are kept; their log-probs under the first policy were recorded when they
were sampled. The mean of log p(then) - log p(now) over a completion is an unbiased estimate of
KL(first || now), for the price of a forward pass over one completion in ``ONE_IN``; of fewer than
``FEWEST`` it would be noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from covey.errors import CheckpointError
from covey.learner.batching import Batch, collate
from covey.learner.learner import Learner
from covey.models.policy import Policy
from covey.runs.rollouts import read_rollouts
from covey.system.processes import by_first
from covey.types import Completion, Group, Problem, SamplingMask
from covey_verify.errors import ConfigError

ONE_IN = 32
"""Of the first step's completions one in so many is kept: under 1 % of a step's time."""
FEWEST, MOST = 8, 32


@dataclass
class Drift:
    """The completions that are kept. They are read from the run folder, so a resumed run has the same."""

    folder: Path
    kept: Batch | None = None

    def metrics(self, learner: Learner[Policy], temperature: float) -> dict[str, float]:
        """`kl/start`, nats a completion; nothing before the first step is written down, or if it is gone."""
        self.kept = self.kept or by_first(lambda: first_completions(self.folder))
        if self.kept is None:
            return {}
        now = learner.score(self.kept, temperature).logprobs
        moved = (self.kept.sampler_logprobs - now).where(self.kept.mask, 0.0)
        return {"kl/start": float(moved.sum(-1).mean())}


def first_completions(folder: Path) -> Batch | None:
    """Some completions of a run's first step, spread evenly over it; None where they are gone or damaged.

    Raises OSError, with the file's name, where a read fails time and again.
    """
    try:
        log = read_rollouts(folder, 0)
        count = min(MOST, max(FEWEST, len(log.rows) // ONE_IN), len(log.rows))
        chosen = np.unique(np.linspace(0, len(log.rows) - 1, count).astype(int))
        return collate([_as_group(log.arrays, log.rows[i]["group"], int(i)) for i in chosen])
    except (CheckpointError, ConfigError):
        return None


def _as_group(log: dict[str, np.ndarray], group: int, row: int) -> Group:
    prompt = _between(log["prompt_tokens"], log["prompt_ends"], group)
    tokens, logprobs = (_between(log[name], log["ends"], row) for name in ("tokens", "logprobs"))
    mask = _mask(log, row) if "kept_ids" in log else None
    drawn = _between(log["sampled"], log["ends"], row) if "sampled" in log else None
    completion = Completion(tokens, logprobs, "", "stop", sampling_mask=mask, sampled=drawn)
    return Group(Problem("", ""), prompt, (completion,), np.ones(1))


def _between(values: np.ndarray, ends: np.ndarray, number: int) -> np.ndarray:
    return values[int(ends[number - 1]) if number else 0 : int(ends[number])]


def _mask(log: dict[str, np.ndarray], row: int) -> SamplingMask:
    ends = _between(log["kept_ends"], log["ends"], row)
    before = int(log["ends"][row - 1]) if row else 0
    start = int(log["kept_ends"][before - 1]) if before else 0
    stop = int(ends[-1]) if len(ends) else start
    return SamplingMask(log["kept_ids"][start:stop], ends - start)
