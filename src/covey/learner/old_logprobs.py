"""Old log-probs: the source of the log-probs that importance ratios divide by."""

from __future__ import annotations

from enum import Enum

from covey.objective.algorithms import Algorithm
from covey.sampling.base import Sampler


class OldLogprobs(Enum):
    """A source of the old log-probs, and the reason to use it."""

    CURRENT = (
        "one update and nothing else reads them: the policy has not moved, the ratio is 1 by construction"
    )
    RECORDED = "the sampler's are the policy's own, bit for bit: recomputing them would change nothing"
    RECOMPUTED = "the sampler rounds in another way, so the policy computes them before its first update"
    SAMPLER = (
        "the algorithm asks for the ratio to the sampler (`old: sampler`), whatever lies between the two"
    )

    @property
    def starts_at_one(self) -> bool:
        """Whether the first update's ratio is 1 by definition, so that no rounding may show in it."""
        return self is not OldLogprobs.SAMPLER


def old_logprob_source(algorithm: Algorithm, sampler: Sampler, updates: int) -> OldLogprobs:
    """Return the source for a rollout batch that gets ``updates`` optimizer steps."""
    if algorithm.old == "sampler":
        return OldLogprobs.SAMPLER
    if updates == 1 and not algorithm.needs_old:
        return OldLogprobs.CURRENT
    return OldLogprobs.RECORDED if sampler.bit_exact else OldLogprobs.RECOMPUTED
