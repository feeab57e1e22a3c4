"""The naive trainer's state, and how its weights move: summed gradients, clipping, AdamW.

Like the trainer itself this imports nothing of covey.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypedDict

import torch
from torch import Tensor

from covey.proof.decoder import NamedWeights, Product, exact_product
from covey.proof.formulas import AxisSettings

ROUNDING = 1e-10
"""Norm up to which a gradient is 0 but for float64: a baseline may miss its only reward by 1e-16."""


class ShadowKL(TypedDict):
    """The settings of a KL penalty."""

    coef: float
    to: Literal["reference", "sampler"]
    place: Literal["loss", "reward"]
    level: Literal["token", "completion"]
    estimator: AxisSettings
    gradient: Literal["formula", "score", "ratio", "straight_through"]
    bound: float | None
    target: float | None
    """The drift to which a controller of the coefficient steers."""
    horizon: float
    refresh_every: int | None
    """Optimizer steps after which the reference moves towards the policy."""
    refresh_mix: float


class ShadowEntropy(TypedDict):
    """The settings of an entropy bonus."""

    coef: float
    target: float | None


class ShadowCritic(TypedDict):
    """The settings of a critic."""

    trunk: Literal["own", "policy"]
    model: str | None
    lr: float
    warmup: int
    """Training steps in which only the critic is trained."""
    clip: float | None
    lam: float
    pull: float
    """Factor of the gradient into a trunk that the critic shares with the policy."""


class ShadowAlgorithm(TypedDict):
    """Every axis, spelled out as in config.yaml; a function is {name, settings...}."""

    advantage: AxisSettings
    whiten: AxisSettings | None
    select_tokens: AxisSettings | None
    ratio: AxisSettings
    surrogate: AxisSettings
    correction: list[AxisSettings]
    token_weights: list[AxisSettings]
    reduce: AxisSettings
    old: Literal["trainer", "sampler"]
    """The source of the old log-probs."""
    kl: ShadowKL | None
    entropy: ShadowEntropy | None
    nll: float
    critic: ShadowCritic | None


class ShadowTrain(TypedDict):
    """The settings of the optimizer steps."""

    steps: int
    lr: float
    schedule: Literal["constant", "linear", "cosine"] | dict[str, float]
    """A name, or a name with the fraction of ``lr`` that it ends at."""
    warmup_steps: int
    betas: tuple[float, float]
    weight_decay: float
    grad_clip: float
    batch_size: int
    inner_epochs: int
    updates_per_batch: int


@dataclass(frozen=True)
class ShadowConfig:
    """The settings that affect the weights."""

    model: AxisSettings
    """The model's own config.json: layers, heads, rotary base, ..."""
    algorithm: ShadowAlgorithm
    train: ShadowTrain
    temperature: float
    max_tokens: int
    mask_truncated: bool
    group_size: int
    seed: int
    rounded: bool = False
    """Whether the run computes with bfloat16 copies of float32 weights."""
    product: Product = exact_product
    """The product of a layer's input and its weight."""
    vocabulary: int | None = None
    """Number of ids that may be drawn; the model's others are padding."""
    staleness: int = 0
    """Number of steps by which a completion may lag behind the weights."""


@dataclass
class ShadowTrainer:
    """The state of training: weights under training, AdamW's moments, the coefficients that move."""

    weights: NamedWeights
    reference: NamedWeights
    critic: ShadowTrainer | None = None  # a network with a value head, or the head alone
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    first: NamedWeights = field(default_factory=dict)
    second: NamedWeights = field(default_factory=dict)
    applied: int = 0  # AdamW steps so far
    updates: int = 0  # AdamW steps before the present training step


def gradient_step(
    learners: Sequence[ShadowTrainer], setting: ShadowConfig, parts: Iterable[Tensor], optimizer_step: int
) -> list[float]:
    """Sum the gradients of parts of a loss, clip them and move the learners. Return the norms."""
    totals: list[NamedWeights] = [
        {name: torch.zeros_like(w) for name, w in t.weights.items() if w.requires_grad} for t in learners
    ]
    places = [(t, total, name) for t, total in zip(learners, totals, strict=True) for name in total]
    for loss in parts:
        if loss.requires_grad:
            moving = [t.weights[name] for t, _, name in places]
            gradients = torch.autograd.grad(loss, moving, allow_unused=True)
            for (_, total, name), gradient in zip(places, gradients, strict=True):
                total[name] += 0.0 if gradient is None else gradient
    norms = [_norm(total.values()) for total in totals]
    for learner, total, norm in zip(learners, totals, norms, strict=True):
        if norm or learner.first:  # a learner without a gradient so far has no moments to move it
            adamw(learner, setting, total, norm, optimizer_step)
    return norms


def _norm(gradients: Iterable[Tensor]) -> float:
    norm = math.sqrt(math.fsum(float(g.square().sum()) for g in gradients))
    return norm if norm > ROUNDING else 0.0


@torch.no_grad()
def adamw(
    trainer: ShadowTrainer, setting: ShadowConfig, gradient: NamedWeights, norm: float, optimizer_step: int
) -> None:
    """Clip the gradient by its norm, and move the weights. Loshchilov and Hutter, arXiv 1711.05101."""
    train = setting.train
    trainer.applied += 1
    critic = setting.algorithm["critic"] if "value.weight" in gradient else None
    lr = rate_at(critic["lr"] if critic else train["lr"], train, optimizer_step)
    beta1, beta2 = train["betas"]
    scale = min(1.0, train["grad_clip"] / (norm + 1e-6))
    for name, raw in gradient.items():
        g = raw * scale
        w = trainer.weights[name]
        trainer.first[name] = beta1 * trainer.first.get(name, torch.zeros_like(g)) + (1 - beta1) * g
        trainer.second[name] = beta2 * trainer.second.get(name, torch.zeros_like(g)) + (1 - beta2) * g**2
        first = trainer.first[name] / (1 - beta1**trainer.applied)
        second = trainer.second[name] / (1 - beta2**trainer.applied)
        decay = train["weight_decay"] if w.ndim > 1 else 0.0
        w.copy_(w * (1 - lr * decay) - lr * first / (second.sqrt() + 1e-8))


def rate_at(lr: float, train: ShadowTrain, optimizer_step: int) -> float:
    """Return the learning rate of an optimizer step (from 0): linear warm-up to ``lr``, then the schedule."""
    warm = train["warmup_steps"]
    updates_per_step = train["inner_epochs"] * train["updates_per_batch"]
    if optimizer_step < warm * updates_per_step:
        return lr * (optimizer_step // updates_per_step + 1) / warm
    progress = (optimizer_step - warm * updates_per_step) / max((train["steps"] - warm) * updates_per_step, 1)
    falls = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
    schedule = train["schedule"]
    ((name, floor),) = schedule.items() if isinstance(schedule, dict) else [(schedule, 0.0)]
    return float(lr * (floor + (1 - floor) * falls[name]))
