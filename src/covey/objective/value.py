"""With a critic: advantages from its values, and its loss. covey does not train critics yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from covey.types import NonNegative, Positive, Share

if TYPE_CHECKING:
    from torch import Tensor


def gae(
    token_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: Share = 1.0,
    lam: Share = 0.95,
    length_adaptive: Positive | None = None,
) -> Tensor:
    """A_t = sum_k (gamma lam)^k delta_{t+k}, delta_t = r_t + gamma V_{t+1} - V_t. (N, T) -> (N, T).

    Masked gaps (tool output) are bridged: the next trained token follows the last one directly.
    ``length_adaptive`` alpha sets lam = max(0, 1 - 1/(alpha l)) by completion (VAPO, 2504.05118, .05;
    its critic learns from lam 1). GAE, arXiv 1506.02438.
    """
    decay = token_rewards.new_tensor(lam).expand(len(mask))
    if length_adaptive is not None:
        decay = 1 - 1 / (length_adaptive * mask.sum(-1).to(token_rewards.dtype)).clamp(min=1)
    advantages = token_rewards.new_zeros(mask.shape)
    running, next_value = advantages[:, 0], advantages[:, 0]
    for t in range(mask.shape[1] - 1, -1, -1):
        on = mask[:, t]
        delta = token_rewards[:, t] + gamma * next_value - values[:, t]
        running = (delta + gamma * decay * running).where(on, running)
        next_value = values[:, t].where(on, next_value)
        advantages[:, t] = running.where(on, 0.0)
    return advantages


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip_value: NonNegative | None = None
) -> Tensor:
    """(V - R)^2 / 2, or the larger of it and that of V within ``clip_value`` of V_old. (N, T)."""
    loss = (values - returns).square()
    if clip_value is not None:
        near = old_values + (values - old_values).clamp(-clip_value, clip_value)
        loss = loss.maximum((near - returns).square())
    return loss / 2
