"""Aggregation: how much one token weighs in the loss of an optimizer step.

Every reduction is a weight per completion, (N,); the loss is sum_it weight_i value_it mask_it.
All counts are over the whole optimizer step (``Totals``), so micro-batches, packing and
processes add up to exactly the same loss and gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from covey.objective.setting import Setting
from covey_verify.types import Count, NonNegative

if TYPE_CHECKING:
    from torch import Tensor

RowCount = Annotated[
    Literal["trained", "all"],
    # A truncated completion may be masked, and still be a row.
    Setting("Completions that a mean counts: trained ones, or all (TRL)."),
]


@dataclass(frozen=True)
class Totals:
    """The counts of one optimizer step, summed over all its micro-batches and processes."""

    tokens: int
    """Trained tokens (mask true)."""
    completions: int
    """Completions with at least one trained token."""
    prompts: int
    """Prompts with at least one such completion."""
    max_tokens: int
    """The limit on a completion's length, the default of ``constant_length``."""
    rows: int = 0
    """All completions, including those without a trained token."""
    correct_tokens: int = 0
    """Trained tokens of correct completions."""

    def count(self, rows: RowCount) -> int:
        """Return the number of completions that a mean over them divides by."""
        return self.completions if rows == "trained" else self.rows


def token_mean(
    lengths: Tensor,
    totals: Totals,
    *,
    eps: Annotated[NonNegative, Setting("Added to the number of tokens (NeMo-RL: 1e-8).")] = 0.0,
) -> Tensor:
    """1 / (all tokens of the step + eps): every token weighs the same. (N,) -> (N,). DAPO, 2503.14476."""
    return _inverse(lengths.new_tensor(totals.tokens).expand_as(lengths), eps)


def sequence_mean(
    lengths: Tensor,
    totals: Totals,
    *,
    rows: RowCount = "trained",
    eps: Annotated[
        NonNegative, Setting("Added to each completion's tokens (verl, OpenRLHF, NeMo-RL: 1e-8).")
    ] = 0.0,
) -> Tensor:
    """1 / (N (|y_i| + eps)): every completion weighs the same. (N,) -> (N,). GRPO, arXiv 2402.03300.

    N counts the completions that are trained, or ``all``, as TRL and verl do.
    """
    return _inverse((lengths.clamp(min=1) + eps) * totals.count(rows))


def sequence_sum(lengths: Tensor, totals: Totals, *, rows: RowCount = "trained") -> Tensor:
    """1 / N: a completion weighs by its length. (N,) -> (N,). LUSPO, arXiv 2602.05261."""
    return _inverse(lengths.new_tensor(totals.count(rows)).expand_as(lengths))


def constant_length(
    lengths: Tensor,
    totals: Totals,
    *,
    length: Annotated[Count | None, Setting("The constant divisor; none: rollout.max_tokens.")] = None,
    rows: RowCount = "trained",
) -> Tensor:
    """1 / (N L), L constant, by default the token limit. (N,) -> (N,). Dr. GRPO, 2503.20783."""
    constant = totals.count(rows) * (length or totals.max_tokens)
    return _inverse(lengths.new_tensor(constant).expand_as(lengths))


def token_sum(lengths: Tensor) -> Tensor:
    """1: a plain sum over tokens, which grows with the batch; Adam does not mind. (N,) -> (N,)."""
    return lengths.new_ones(lengths.shape)


def prompt_mean(group_tokens: Tensor, totals: Totals) -> Tensor:
    """1 / (prompts * tokens of the prompt's group): every prompt weighs the same. (N,) -> (N,).

    ScaleRL, arXiv 2510.13786. ``group_tokens`` (N,) counts the trained tokens of each completion's group.
    """
    return _inverse(group_tokens * totals.prompts)


def _inverse(counts: Tensor, eps: float = 0.0) -> Tensor:
    # A count of 0 has no trained token to weigh, so its weight only has to be finite.
    return 1 / (counts.clamp(min=1) + eps)
