"""Comparison of a step of the shadow trainer with the recorded one, or with its twin's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file

from covey.proof.decoder import NamedWeights


@dataclass(frozen=True)
class Agreement:
    """The largest differences between a step of the shadow and the record of the run."""

    step: int
    """Counted from 1."""
    gradient: float
    """Relative difference of the mean gradient norm of the step's updates."""
    logprobs: float | None = None
    """Difference in nats between the sampler's log-probs and the shadow's, under the version of the weights
    that sampled each token; None without any token whose version the shadow still has."""
    advantages: float | None = None
    """Difference of advantages over the step's largest advantage."""
    kl_coef: float | None = None
    """Relative difference of the KL coefficient."""
    metrics: float | None = None
    """Difference of the loss and its metrics, with given examples; relative for values above 1."""
    weights: float | None = None
    """Difference of the weights after the step, if a checkpoint holds them."""
    course: float | None = None
    """Norm of that difference over the distance that the run has moved the weights."""
    apart: Agreement | None = None
    """The same differences between the shadow and its twin: the effect of rounding alone."""


class StepFigures(NamedTuple):
    """The figures of one trainer's step that are compared, with completions in the recorded order."""

    logprobs: Sequence[torch.Tensor]
    """Log-probs of the tokens, each under the weights that sampled it."""
    advantages: Sequence[torch.Tensor]
    norm: float
    """Mean gradient norm of the step's updates."""
    kl_coef: float | None
    weights: NamedWeights
    """Weights after the step; empty if they were not saved."""


NUDGE = 2.0**-21
"""Relative difference of a twin's first weights."""
COARSE_NUDGE = 2.0**-9
"""The same if weights are rounded to bfloat16."""


def with_twin(model: NamedWeights, coarsely: bool, twin: bool) -> list[NamedWeights]:
    """Return the weights that shadows begin with: the model's and, with ``twin``, nearly the same."""
    return [model, nudge_weights(model, coarsely)] if twin else [model]


def nudge_weights(model: NamedWeights, coarsely: bool) -> NamedWeights:
    """Return the weights with random relative changes of the size of rounding."""
    random = torch.Generator().manual_seed(0)
    nudge = COARSE_NUDGE if coarsely else NUDGE
    moved = {
        name: w.detach() * (1 + nudge * torch.randn(w.shape, generator=random, dtype=w.dtype))
        for name, w in model.items()
    }
    return {name: moved[name].requires_grad_(w.requires_grad) for name, w in model.items()}


def agreement(
    number: int,
    shadow: StepFigures,
    other: StepFigures,
    tokens: Sequence[slice | torch.Tensor],
    start: NamedWeights,
) -> Agreement:
    """Compare a shadow's step with another, log-probs only at the ``tokens`` of each completion."""
    logprobs = zip(shadow.logprobs, other.logprobs, tokens, strict=True)
    advantages = zip(shadow.advantages, other.advantages, strict=True)
    largest = max((float(a.abs().max()) for a in other.advantages), default=0.0)
    coefficient = shadow.kl_coef or 0.0
    other_coefficient = coefficient if other.kl_coef is None else other.kl_coef
    largest_gap, course = weights_apart(shadow.weights, other.weights, start)
    return Agreement(
        number + 1,
        logprobs=max((_gap(a[at], b[at]) for a, b, at in logprobs), default=0.0),
        advantages=max((_gap(a, b) for a, b in advantages), default=0.0) / max(largest, 1e-9),
        gradient=abs(shadow.norm - other.norm) / max(shadow.norm, 1e-9),
        kl_coef=abs(coefficient - other_coefficient) / max(coefficient, 1e-9),
        weights=largest_gap,
        course=course,
    )


def _gap(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first - second).abs().max()) if len(first) else 0.0


def weights_apart(
    shadow: NamedWeights, other: NamedWeights, start: NamedWeights
) -> tuple[float | None, float | None]:
    """Return the largest difference of weights, and its norm relative to the way from ``start``."""
    if not other:
        return None, None
    trained = [name for name, w in shadow.items() if w.requires_grad]
    gap = torch.cat([(shadow[name] - other[name]).detach().flatten() for name in trained])
    way = torch.cat([(start[name] - other[name]).detach().flatten() for name in trained])
    return float(gap.abs().max()), float(gap.norm() / way.norm().clamp(min=1e-30))


def read_saved_weights(run: Path, number: int, steps: int, shadow: NamedWeights) -> NamedWeights:
    """Return the weights that a run saved after a step and that the shadow trains; empty if none."""
    folder = run / ("final" if number + 1 == steps else f"checkpoints/step_{number + 1:06d}")
    trained = [name for name, w in shadow.items() if w.requires_grad]
    adapter = next(folder.glob("**/adapter_model.safetensors"), None)
    if adapter is not None:
        names = {f"base_model.model.{name}.weight": name for name in trained}
        return {names[name]: w.double() for name, w in load_file(adapter).items()}
    if not (folder / "model.safetensors").exists():
        return {}
    recorded = {name: w.double() for name, w in load_file(folder / "model.safetensors").items()}
    masters = folder / "optimizer.safetensors"
    if masters.exists():
        optimizer = load_file(masters)  # has a bfloat16 model's float32 weights, numbered as they are trained
        for i, name in enumerate(trained):
            recorded[name] = optimizer.get(f"master.{i}", recorded[name]).double()
    return recorded
