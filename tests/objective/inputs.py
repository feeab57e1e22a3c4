"""Inputs of a loss whose ratios can be computed by head, and algorithms that differ from GRPO."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from covey.objective.algorithms import PRESETS, Algorithm
from covey.objective.data import LossInputs
from covey.objective.reductions import Totals

MASK = torch.tensor([[1, 1], [1, 0]]).bool()
TOTALS = Totals(tokens=6, completions=4, prompts=2, max_tokens=10)
LOG = math.log


def t(*rows: list[float], grad: bool = False) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64, requires_grad=grad)


def made_inputs(**changes) -> LossInputs:
    """Ratios 3/2 and 1, and 1/2; advantages 1 and -2; part of a step of six tokens."""
    old = t([-1, -2], [-3, 0])
    given = {
        "logprobs": (old + t([LOG(1.5), 0], [LOG(0.5), 0])).requires_grad_(),
        "mask": MASK,
        "advantages": t([1, 1], [-2, 0]),
        "old_logprobs": old,
        "totals": TOTALS,
        "group_tokens": torch.tensor([3, 3]),
    }
    return LossInputs(**{**given, **changes})


def algorithm(**changes) -> Algorithm:
    return replace(replace(PRESETS["grpo"], kl=None), **changes)
