"""Tinker's loss functions, as sums of covey's surrogates over the tokens of one datum.

Each takes the log-probs of the targets, (N,) or (N, K), with gradient, and the datum's other arrays, and
returns a scalar. Thresholds bound the ratio p / q itself, not its distance from 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from covey.objective import ratios, surrogates
from covey_verify.errors import DataError

Inputs = Mapping[str, Any]
"""Name -> tensor. A threshold may have a value per token; surrogates are typed for floats, but broadcast."""


class DatumLoss(NamedTuple):
    """A loss function, the arrays that it needs besides the targets, and its settings with their defaults."""

    function: Callable[[Tensor, Inputs], Tensor]
    needs: tuple[str, ...]
    settings: Mapping[str, float | None]
    """Name -> default; None if the caller has to give it."""


def cross_entropy(logprobs: Tensor, inputs: Inputs) -> Tensor:
    """Compute - sum w log p."""
    return -(logprobs * inputs["weights"]).sum()


def importance_sampling(logprobs: Tensor, inputs: Inputs) -> Tensor:
    """Compute - sum (p / q) A."""
    return surrogates.unclipped(_ratio(logprobs, inputs), inputs["advantages"]).sum()


def ppo_loss(logprobs: Tensor, inputs: Inputs) -> Tensor:
    """Compute - sum min(r A, clip(r) A), r = p / q."""
    return _clip_loss(_ratio(logprobs, inputs), inputs)


def cispo_loss(logprobs: Tensor, inputs: Inputs) -> Tensor:
    """Compute - sum sg[clip(p / q)] A log p."""
    floor, cap = inputs["clip_low_threshold"], inputs["clip_high_threshold"]
    ratio = _ratio(logprobs, inputs)
    return surrogates.cispo(ratio, inputs["advantages"], logprobs, cap=cap, floor=floor).sum()


def dro_loss(logprobs: Tensor, inputs: Inputs) -> Tensor:
    """Compute - sum (A log p - beta / 2 (log p - log q)^2)."""
    log_ratio = logprobs - inputs["logprobs"]
    return surrogates.dro(logprobs, inputs["advantages"], log_ratio, beta=inputs["beta"]).sum()


def gspo_loss(logprobs: Tensor, inputs: Inputs) -> Tensor:
    """Compute PPO's sum with r = s p / sg[p], s the geometric mean of p / q where the mask is not 0."""
    counted = (inputs["sequence_ratio_mask"] != 0).flatten()
    if not counted.any():
        return 0.0 * logprobs.sum()
    log_ratio = (logprobs.detach() - inputs["logprobs"]).flatten().where(counted, 0.0)
    mean = ratios.sequence(log_ratio, counted).view_as(logprobs)
    # Unlike in ``ratios.sequence_token``, tokens outside the mask are trained too.
    return _clip_loss(mean * ratios.on_policy(logprobs), inputs)


def _ratio(logprobs: Tensor, inputs: Inputs) -> Tensor:
    return ratios.token(ratios.clamp_log_ratio(logprobs - inputs["logprobs"]))


def _clip_loss(ratio: Tensor, inputs: Inputs) -> Tensor:
    low, high = 1 - inputs["clip_low_threshold"], inputs["clip_high_threshold"] - 1
    return surrogates.clip(ratio, inputs["advantages"], clip_low=low, clip_high=high).sum()


RL_INPUTS = ("logprobs", "advantages")
LOSSES: Mapping[str, DatumLoss] = {
    "cross_entropy": DatumLoss(cross_entropy, ("weights",), {}),
    "importance_sampling": DatumLoss(importance_sampling, RL_INPUTS, {}),
    "ppo": DatumLoss(ppo_loss, RL_INPUTS, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "cispo": DatumLoss(cispo_loss, RL_INPUTS, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "dro": DatumLoss(dro_loss, RL_INPUTS, {"beta": None}),
    "gspo": DatumLoss(
        gspo_loss,
        (*RL_INPUTS, "sequence_ratio_mask"),
        {"clip_low_threshold": None, "clip_high_threshold": None},
    ),
}
UNSUPPORTED = {
    "stable_reinforce": "Tinker has not published its formula; set loss_fn=importance_sampling, ppo or cispo",
    "custom": "losses run in the client here; the SDK does so unless the server asks for them",
}


def loss_of(name: str, config: Mapping[str, float | str]) -> tuple[DatumLoss, dict[str, Tensor]]:
    """Return the loss of this name and its settings.

    Raises DataError if the name or a setting is unknown, or a value is not a number.
    """
    loss = LOSSES.get(name)
    if loss is None:
        reason = UNSUPPORTED.get(name) or "there are " + ", ".join(LOSSES)
        raise DataError(f"loss_fn {name!r}: {reason}")
    for key, value in config.items():
        if key not in loss.settings:
            raise DataError(
                f"loss_fn_config: {name} has no {key!r}; it has {', '.join(loss.settings) or 'none'}"
            )
        if isinstance(value, str) or not math.isfinite(value):
            raise DataError(f"loss_fn_config: {key} is a number, not {value!r}")
    settings = {**loss.settings, **config}
    return loss, {
        k: torch.tensor(float(v), dtype=torch.float32) for k, v in settings.items() if v is not None
    }
