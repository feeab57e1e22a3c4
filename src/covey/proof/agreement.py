"""What a shadow's step is compared by with a recorded one, or with its twin's."""

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
    """One step's record beside the shadow's: the largest differences."""

    step: int
    gradient: float
    """Of the mean norm of the step's updates, relative."""
    logprobs: float | None = None
    """Nats, between what the sampler recorded and float64 under the shadow's weights of the version that drew
    each token, where the shadow still has these."""
    advantages: float | None = None
    """As a fraction of the step's largest advantage."""
    kl_coef: float | None = None
    """Of the KL coefficient, relative."""
    told: float | None = None
    """Of the loss and of the metrics beside it, where examples are given; relative to values above 1."""
    weights: float | None = None
    """Of the weights after the step, where a checkpoint holds them."""
    course: float | None = None
    """The norm of that difference as a fraction of how far the run has moved the weights."""
    apart: Agreement | None = None
    """The same differences between the shadow and its twin: what rounding alone comes to by then."""


class StepFigures(NamedTuple):
    """What one trainer's step is compared by with another's, in this order of completions."""

    logprobs: Sequence[torch.Tensor]
    """Of the tokens, each under the weights that drew it."""
    advantages: Sequence[torch.Tensor]
    norm: float
    """The mean of the updates' gradients."""
    kl_coef: float | None
    weights: NamedWeights
    """After the step; none where they were not kept."""


NUDGE, COARSE_NUDGE = 2.0**-21, 2.0**-9
"""By how much a twin's first weights differ, relative: where they are rounded to bfloat16 it is by 2^-9."""


def nudged(model: NamedWeights, coarsely: bool) -> NamedWeights:
    """The same weights but for their rounding."""
    random, nudge = torch.Generator().manual_seed(0), COARSE_NUDGE if coarsely else NUDGE
    moved = {
        name: w.detach() * (1 + nudge * torch.randn(w.shape, generator=random, dtype=w.dtype))
        for name, w in model.items()
    }
    return {name: moved[name].requires_grad_(w.requires_grad) for name, w in model.items()}


def agreement(
    number: int,
    own: StepFigures,
    other: StepFigures,
    known: Sequence[slice | torch.Tensor],
    start: NamedWeights,
) -> Agreement:
    """A shadow's step beside another; of log-probs where ``known`` says so."""
    logprobs = zip(own.logprobs, other.logprobs, known, strict=True)
    advantages = zip(own.advantages, other.advantages, strict=True)
    largest = max((float(a.abs().max()) for a in other.advantages), default=0.0)
    coefficient = own.kl_coef or 0.0
    theirs = coefficient if other.kl_coef is None else other.kl_coef
    largest_gap, course = weights_apart(own.weights, other.weights, start)
    return Agreement(
        number,
        logprobs=max((_gap(a[now], b[now]) for a, b, now in logprobs), default=0.0),
        advantages=max((_gap(a, b) for a, b in advantages), default=0.0) / max(largest, 1e-9),
        gradient=abs(own.norm - other.norm) / max(own.norm, 1e-9),
        kl_coef=abs(coefficient - theirs) / max(coefficient, 1e-9),
        weights=largest_gap,
        course=course,
    )


def _gap(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max()) if len(one) else 0.0


def weights_apart(
    own: NamedWeights, other: NamedWeights, start: NamedWeights
) -> tuple[float | None, float | None]:
    """A shadow's weights beside others, if there are any: the largest difference; the course."""
    if not other:
        return None, None
    trained = [name for name, w in own.items() if w.requires_grad]
    gap, way = (
        torch.cat([(begin[name] - other[name]).detach().flatten() for name in trained])
        for begin in (own, start)
    )
    return float(gap.abs().max()), float(gap.norm() / way.norm().clamp(min=1e-30))


def saved(run: Path, number: int, steps: int, own: NamedWeights) -> NamedWeights:
    """The weights that a run kept after a step, of those that ``own`` trains; nothing where it kept none."""
    folder = run / ("final" if number + 1 == steps else f"checkpoints/step_{number + 1:06d}")
    trained = [name for name, w in own.items() if w.requires_grad]
    adapter = next(folder.glob("**/adapter_model.safetensors"), None)
    if adapter is not None:
        names = {f"base_model.model.{name}.weight": name for name in trained}
        return {names[name]: w.double() for name, w in load_file(adapter).items()}
    if not (folder / "model.safetensors").exists():
        return {}
    recorded = {name: w.double() for name, w in load_file(folder / "model.safetensors").items()}
    if (masters := folder / "optimizer.safetensors").exists():
        kept = load_file(masters)  # a bfloat16 model's float32 weights, numbered as they are trained
        recorded |= {name: kept.get(f"master.{i}", recorded[name]).double() for i, name in enumerate(trained)}
    return recorded
