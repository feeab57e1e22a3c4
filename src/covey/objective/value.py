"""The critic: advantages from its values, its targets and its loss.

``token_rewards`` (N, T) are the rewards of tokens. A completion's or a step's reward stands at its last
token, a KL penalty by token at each token. ``values`` (N, T) are V of the text before each token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge

from covey.objective.setting import Setting
from covey_verify.types import Fraction, NonNegative, Positive

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Critic:
    """A learned value of prefixes, the baseline of ``gae``."""

    trunk: Annotated[
        Literal["own", "policy"],
        Setting("own: a network besides the policy. policy: a head on the policy's hidden states."),
    ] = "own"
    model: Annotated[
        str | None,
        Setting("Value or reward model from which an own network starts; none: a copy of the policy."),
    ] = None
    lr: Annotated[
        NonNegative,
        Setting(
            "Learning rate of the critic, on the policy's schedule; mostly larger than the policy's, and "
            "larger still for a head alone.",
            usual="1e-6 to 1e-5 for a network of its own, 1e-4 to 1e-2 for a head or a tiny model",
        ),
    ] = 1e-5
    lam: Annotated[
        Fraction,
        Setting(
            "Lambda of the critic's targets. 1: the rewards that followed (VAPO); less: the critic trusts "
            "its own later values.",
            usual="0.95 to 1",
        ),
    ] = 0.95
    clip: Annotated[
        Positive | None, Setting("Largest change of a value in a step; none: plain squared error.")
    ] = 0.2
    pull: Annotated[
        Fraction, Setting("Factor of its gradient in the policy's trunk; 0: only the head learns.")
    ] = 0.1
    warmup: Annotated[
        int,
        Ge(0),
        Setting("First steps in which the critic learns and the policy waits.", usual="0 to 50"),
    ] = 0


def gae(
    token_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: Annotated[Fraction, Setting("Discount of later rewards; 1 for reasoning.")] = 1.0,
    lam: Annotated[
        Fraction, Setting("1: returns, unbiased; less: trusts the critic more, less variance.")
    ] = 0.95,
    length_adaptive: Annotated[
        Positive | None, Setting("Sets lam to 1 - 1 / (this * length) for each completion, as VAPO does.")
    ] = None,
) -> Tensor:
    """A_t = sum_k (gamma lam)^k delta_{t+k}, delta_t = r_t + gamma V_{t+1} - V_t. (N, T) -> (N, T).

    Masked tokens (tool output) are skipped: the next trained token follows the last one directly.
    ``length_adaptive`` alpha sets lam = max(0, 1 - 1/(alpha l)) by completion (VAPO, 2504.05118, .05;
    its critic learns from lam 1). GAE, arXiv 1506.02438.
    """
    # (N,) lambda of each completion; if adapted, 0 for lengths up to 1 / alpha.
    decay = token_rewards.new_tensor(lam).expand(len(mask))
    if length_adaptive is not None:
        decay = 1 - 1 / (length_adaptive * mask.sum(-1).to(token_rewards.dtype)).clamp(min=1)
    advantages = token_rewards.new_zeros(mask.shape)
    running = advantages[:, 0]
    next_value = advantages[:, 0]
    # Backwards. At a masked token ``running`` and ``next_value`` (N,) keep their values.
    for t in range(mask.shape[1] - 1, -1, -1):
        on = mask[:, t]
        delta = token_rewards[:, t] + gamma * next_value - values[:, t]
        running = (delta + gamma * decay * running).where(on, running)
        next_value = values[:, t].where(on, next_value)
        advantages[:, t] = running.where(on, 0.0)
    return advantages


def value_targets(
    token_rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: Fraction = 1.0, lam: Fraction = 0.95
) -> Tensor:
    """R_t = A_t(lam) + V_t, a critic's targets; lam 1: discounted returns, whatever the values. (N, T)."""
    return (gae(token_rewards, values, mask, gamma=gamma, lam=lam) + values).where(mask, 0.0)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip_value: NonNegative | None = None
) -> Tensor:
    """(V - R)^2 / 2; with ``clip_value`` the larger of it and the same for V clipped around V_old. (N, T)."""
    loss = (values - returns).square()
    if clip_value is not None:
        near = old_values + (values - old_values).clamp(-clip_value, clip_value)
        # The larger one, so that clipping never makes a step look better than it is.
        loss = loss.maximum((near - returns).square())
    return loss / 2
