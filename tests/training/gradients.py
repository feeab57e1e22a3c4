"""Random pairs of answers, and the comparison of gradients by parameter."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from covey.sampling.prompts import EncodedProblem, GivenAnswer
from covey.types import Problem


def pairs(*sizes: tuple[int, int, int]) -> list[EncodedProblem]:
    """Pairs with a prompt, a chosen and a rejected answer of so many random tokens."""
    rng = np.random.default_rng(0)
    found = []
    for n, (prompt, *answers) in enumerate(sizes):
        given = tuple(GivenAnswer(rng.integers(5, 300, size=k), np.ones(k, dtype=bool)) for k in answers)
        found.append(
            EncodedProblem(Problem(f"p{n}", "p"), rng.integers(5, 300, size=prompt), given, (1.0, 0.0))
        )
    return found


def close(one: dict[str, Tensor], other: dict[str, Tensor], within: float = 1e-5) -> None:
    scale = max(g.abs().max() for g in other.values())
    for name, gradient in one.items():
        assert (gradient - other[name]).abs().max() < within * max(scale, 1.0), name


def gradient_of(loss: Tensor, model: torch.nn.Module) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {n: torch.zeros_like(named[n]) if g is None else g for n, g in zip(named, found, strict=True)}
