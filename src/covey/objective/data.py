"""The data that functions of the objective may ask for by name, axis by axis.

``ratio``, ``surrogate``, ``reduce``, ``correction`` and ``token_weights`` read a micro-batch's
``LossInputs``, the other axes the records below it. A config may not name a function that asks for more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING

from covey.objective.ratios import clamp_log_ratio
from covey_verify.types import StepRewards

if TYPE_CHECKING:
    from torch import Tensor

    from covey.objective.reductions import Totals

# Fields of ``LossInputs`` that keep their gradient; other (N, T) values are detached.
_CARRY_GRADIENT = {"logprobs", "entropy", "full_kl", "ratio"}
# Fields that stay as they are: one value per completion or step, or the mask itself.
_BY_ROW = {"mask", "totals", "group_tokens", "correct", "group"}


@dataclass(frozen=True)
class LossInputs:
    """Everything that a token loss may be made of, under the names that its functions ask for.

    Shapes are (N, T) unless said otherwise. Values off the mask are replaced by 0, so padding may hold
    NaN or infinity; whatever is not of the policy being trained is detached.
    """

    logprobs: Tensor
    """log pi of the sampled tokens under the policy being trained, at the sampling temperature."""
    mask: Tensor
    """bool: the tokens that are trained."""
    advantages: Tensor
    old_logprobs: Tensor
    """Log-probs of the policy at the start of this rollout batch's updates."""
    totals: Totals
    group_tokens: Tensor
    """(N,) trained tokens in the whole group of each completion."""
    sampler_logprobs: Tensor | None = None
    """Log-probs as the sampler recorded them."""
    ref_logprobs: Tensor | None = None
    entropy: Tensor | None = None
    """Entropy of the policy's distribution at each token, in nats."""
    full_kl: Tensor | None = None
    """KL(pi || ref) over the vocabulary at each token, in nats."""
    selected: Tensor | None = None
    """bool: the tokens singled out by ``select_tokens``; see ``token_weights``."""
    correct: Tensor | None = None
    """(N,) bool: the run's verdict on each completion."""
    group: Tensor | None = None
    """(N,) int64: the group of each completion. Groups are whole if a function asks for this."""
    ratio: Tensor | None = None
    """The importance ratio; set by the algorithm's ratio axis."""

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self) if f.name not in _BY_ROW):
            value = getattr(self, name)
            if value is not None:
                value = value if name in _CARRY_GRADIENT else value.detach()
                # ``where`` and not a product with the mask: NaN * 0 is NaN.
                object.__setattr__(self, name, value.where(self.mask, value.new_zeros(())))
        object.__setattr__(self, "group_tokens", self.group_tokens.to(self.advantages.dtype))

    @property
    def lengths(self) -> Tensor:
        """(N,) trained tokens of each completion."""
        return self.mask.sum(-1).to(self.advantages.dtype)

    @cached_property
    def log_ratio(self) -> Tensor:
        """log pi - log pi_old, bounded."""
        return clamp_log_ratio(self.logprobs - self.old_logprobs)

    @property
    def mismatch(self) -> Tensor:
        """old_logprobs - sampler_logprobs, bounded: trainer against sampler."""
        assert self.sampler_logprobs is not None
        return clamp_log_ratio(self.old_logprobs - self.sampler_logprobs)

    @property
    def sampler_log_ratio(self) -> Tensor:
        """log pi - the log-probs that the sampler recorded."""
        assert self.sampler_logprobs is not None
        return self.logprobs - self.sampler_logprobs

    @property
    def ref_log_ratio(self) -> Tensor:
        """log pi - log ref."""
        assert self.ref_logprobs is not None
        return self.logprobs - self.ref_logprobs


@dataclass(frozen=True)
class GroupData:
    """The scored completions of one prompt, for ``advantage``. G completions, T tokens, K rewards."""

    rewards: Tensor
    """(G,) float64: the weighted sum, a KL in the reward included."""
    components: Tensor
    """(K, G) float64: reward by reward; NaN where one does not apply."""
    weights: Tensor
    """(K,) float64: the weight of each component."""
    mask: Tensor
    """(G, T) bool: the trained tokens."""
    tokens: Tensor
    """(G, T) int64, -1 after a completion's end."""
    token_rewards: Tensor
    """(G, T) float64: the reward of each token; a row sums to its entry of ``rewards``."""
    steps: Sequence[Sequence[StepRewards]] = ()
    """(K, G): step rewards of each function; none for a function that scores whole completions."""
    greedy_reward: float | None = None
    """Reward of the greedy completion, which is sampled only if a function asks for this."""
    old_logprobs: Tensor | None = None
    """(G, T) float32."""
    old_collision: Tensor | None = None
    """(G, T) float32: sum_v pi(v)^2."""
    values: Tensor | None = None
    """(G, T) float64: the critic's value of the text before each token."""
    running_mean: Tensor | None = None
    """(G,) float64: mean of the rewards before each completion, by the function's settings ``decay`` and
    ``by``; see ``advantages.running_baseline``."""
    segments: Sequence[StepRewards] = ()
    """(G,): the values after each segment but the last; see ``credit.segment_difference``."""

    @property
    def lengths(self) -> Tensor:
        """(G,) float64: trained tokens."""
        return self.mask.sum(-1).double()

    @classmethod
    def scored(
        cls, rewards: Tensor, components: Tensor, weights: Tensor, mask: Tensor, greedy: float | None = None
    ) -> GroupData:
        """Return a group of which only rewards and mask are known, and perhaps the greedy reward."""
        no_ids = mask.long() - 1  # 0, and -1 after the end
        return cls(rewards, components, weights, mask, no_ids, mask.double() * 0.0, greedy_reward=greedy)


def rows_of_groups(group: Tensor, among: Tensor | None = None) -> Iterator[tuple[int, Tensor]]:
    """Yield the number of each group with the rows of its completions. (N,) -> (G,) each.

    ``among``, (N,) bool: only these rows; a group without any of them is left out.
    """
    numbers = group if among is None else group[among]
    for number in numbers.unique().tolist():
        rows = group == number if among is None else (group == number) & among
        yield number, rows.nonzero()[:, 0]


def over_tokens(advantages: Tensor, width: int) -> Tensor:
    """Give each token its completion's advantage, where a group has one per completion. -> (G, T)."""
    return advantages[:, None].expand(-1, width) if advantages.ndim == 1 else advantages


@dataclass(frozen=True)
class BatchData:
    """All trained completions of a rollout batch, for ``whiten``. N completions, T tokens."""

    advantages: Tensor
    """(N, T) float64."""
    mask: Tensor
    """(N, T) bool."""
    rewards: Tensor
    """(N,) float64."""
    group: Tensor
    """(N,) int64: the group of each completion."""


@dataclass(frozen=True)
class FilterData:
    """A scored group, for ``filter``."""

    rewards: Tensor
    """(G,) float64."""
    correct: Tensor
    """(G,) bool."""
    dead: bool
    """Whether no two of the rewards that the algorithm compares differ."""


@dataclass(frozen=True)
class SelectionData:
    """The facts of an optimizer step's completions that are known before it, for ``select_tokens``."""

    advantages: Tensor
    """(N, T) float32."""
    mask: Tensor
    """(N, T) bool."""
    rewards: Tensor
    """(N,) float64."""
    group: Tensor
    """(N,) int64."""
    sampler_logprobs: Tensor
    """(N, T) float32."""
    old_logprobs: Tensor | None
    """(N, T) float32."""
    old_entropy: Tensor | None
    """(N, T) float32."""
    old_collision: Tensor | None
    """(N, T) float32."""
    noise: Tensor | None
    """(N, T) float32, uniform in [0, 1)."""


@dataclass(frozen=True)
class KLData:
    """The data that ``kl.estimator`` may ask for."""

    ref_log_ratio: Tensor | None = None
    """log pi - log ref, by token (N, T) or, at level completion, its sum on every token."""
    full_kl: Tensor | None = None
    """(N, T), in the loss only."""


# Properties may be asked for like fields; ``sampler_log_ratio`` is for ``loss.penalty`` alone.
_OF_LOSS = frozenset(
    {f.name for f in fields(LossInputs)} | {"lengths", "log_ratio", "mismatch", "ref_log_ratio"}
)
OFFERED: Mapping[str, frozenset[str]] = {
    **{
        axis: frozenset(f.name for f in fields(kind)) | ({"lengths"} if kind is GroupData else set())
        for axis, kind in {
            "advantage": GroupData,
            "whiten": BatchData,
            "filter": FilterData,
            "select_tokens": SelectionData,
            "kl.estimator": KLData,
        }.items()
    },
    **dict.fromkeys(("surrogate", "reduce", "correction", "token_weights"), _OF_LOSS),
    "ratio": _OF_LOSS - {"ratio"},
}
"""axis -> the names that its functions may ask for."""
