"""Importance ratios: how far the policy has moved from the sampling policy, at several levels.

Each function maps log_ratio = logprobs - old_logprobs, zero off the mask and bounded, to a ratio
(N, T). The level decides over which tokens the log-ratios are combined before the exponential.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from covey.objective.setting import Setting
from covey_verify.types import Positive

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped here (e^20 = 4.9e8): far outside every clip, still finite in float32."""


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """Clamp a log-ratio to +-``LOG_RATIO_LIMIT``."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def on_policy(logprobs: Tensor) -> Tensor:
    """rho = pi / sg(pi) = 1, with the gradient of log pi: no off-policy correction. (N, T)."""
    # x - sg(x) is 0 and keeps the gradient of x.
    return (logprobs - logprobs.detach()).exp()


def token(log_ratio: Tensor) -> Tensor:
    """rho_t = pi(y_t) / pi_old(y_t). (N, T) -> (N, T). PPO, arXiv 1707.06347."""
    return log_ratio.exp()


def sequence(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """s = exp(mean_t log rho_t), the geometric mean, on every token. (N, T) -> (N, T).

    GSPO, arXiv 2507.18071.
    """
    # log_ratio is 0 off the mask, so this is the sum over trained tokens.
    mean = log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return mean.exp().expand_as(log_ratio)


def sequence_token(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """sg(s) pi_t / sg(pi_t): GSPO's value, each token's own gradient. (N, T) -> (N, T).

    GSPO-token, arXiv 2507.18071 section 4.3: equals ``sequence`` for a constant advantage.
    """
    return sequence(log_ratio, mask).detach() * (log_ratio - log_ratio.detach()).exp()


def completion(log_ratio: Tensor) -> Tensor:
    """prod_t rho_t, the whole completion's ratio, on every token. (N, T) -> (N, T).

    As DeepSeek-R1 prints GRPO (arXiv 2501.12948, equation 1); spreads with length.
    """
    return clamp_log_ratio(log_ratio.sum(-1, keepdim=True)).exp().expand_as(log_ratio)


def geometric_clipped(
    log_ratio: Tensor,
    mask: Tensor,
    advantages: Tensor,
    *,
    clip_log: Annotated[
        Positive, Setting("Bound of each token's log-ratio before the mean; smaller: more cautious.")
    ] = 0.4,
) -> Tensor:
    """exp(mean_t clipped(log rho_t)), each token clipped on the side its advantage favours.

    (N, T) -> (N, T). GMPO, arXiv 2507.20673: clipping before the mean keeps one outlier token
    from deciding for the completion.
    """
    upper = log_ratio.clamp(max=clip_log)
    lower = log_ratio.clamp(min=-clip_log)
    return sequence(upper.where(advantages > 0, lower), mask)
