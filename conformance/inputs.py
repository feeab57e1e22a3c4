"""The inputs of the cases: small numbers to work out by hand, and drawn ones for whole algorithms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Rows = list[list[float]]


def log(rows: Sequence[Sequence[float]]) -> Rows:
    """Log-probs of probabilities, rows filled up with 0."""
    width = max(map(len, rows))
    return [[math.log(p) for p in row] + [0.0] * (width - len(row)) for row in rows]


def mask_of(lengths: Sequence[int], width: int) -> list[list[int]]:
    return [[int(t < n) for t in range(width)] for n in lengths]


TOKENS = {
    "mask": mask_of((2, 3, 1, 0), 3),
    "group": [0, 0, 1, 1],
    "advantages": [1.0, -1.0, 2.0, -2.0],
    "new": log([[0.75, 0.5], [0.25, 0.5, 0.9], [0.25], [0.5]]),
    "old": log([[0.5, 0.5], [0.5, 0.5, 0.5], [0.25], [0.5]]),
    "ref": log([[0.5, 0.5], [0.5, 0.5, 0.5], [0.5], [0.5]]),
    "sampler": log([[0.25, 0.5], [0.625, 0.5, 0.5], [0.25], [0.5]]),
    "entropy": [[0.5, 0.1, 0.0], [0.3, 0.9, 0.2], [0.4, 0.0, 0.0], [0.0, 0.0, 0.0]],
    "old_entropy": [[0.5, 0.1, 0.0], [0.3, 0.9, 0.2], [0.4, 0.0, 0.0], [0.0, 0.0, 0.0]],
    "full_kl": [[0.2, 0.0, 0.0], [0.1, 0.0, 0.3], [0.6, 0.0, 0.0], [0.0, 0.0, 0.0]],
    "noise": [[0.3, 0.8, 0.0], [0.9, 0.9, 0.9], [0.9, 0.0, 0.0], [0.0, 0.0, 0.0]],
    "correct": [1, 0, 1, 0],
    "max_tokens": 10,
}
"""Ratios 1.5, 1 | .5, 1, 1.8 | 1, and a completion of which nothing is trained."""

ONE_GROUP = {
    "group": [0, 0, 0, 0],
    "mask": mask_of((1, 2, 3, 2), 3),
    "rewards": [1.0, 0.0, 0.0, 0.0],
    "components": [[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, 0.0]],
    "weights": [1.0, 0.5],
    "greedy_reward": 0.5,
    "running_mean": [0.0, 0.05, 0.0475, 0.045125],
    "old": log([[0.5], [0.5, 0.5], [0.5, 0.5, 0.5], [0.5, 0.5]]),
    "ref": log([[0.25], [0.5, 0.25], [0.5, 0.5, 0.5], [0.5, 0.5]]),
}
"""One success among four: mean 1/4, sample std 1/2."""

LONE = {"group": [0, 1, 1], "mask": mask_of((2, 1, 1), 2), "rewards": [0.7, 1.0, 0.0]}
"""A completion without siblings beside a group of two."""

TIED = {"group": [0, 0, 0], "mask": mask_of((1, 2, 1), 2), "rewards": [0.7, 0.7, 0.7]}
"""Equal rewards whose mean is not exact in binary."""

STEPS = {
    "group": [0, 0],
    "mask": mask_of((4, 4), 4),
    "rewards": [0.0, 1.0],
    "steps": [
        {"values": [1.0, 1.0, 1.0, -1.0], "ends": [0, 1, 2, 3]},
        {"values": [1.0, 1.0, 1.0, 1.0], "ends": [0, 1, 2, 3]},
    ],
}
"""One wrong step among eight, each of one token: mean 3/4, sample std 1/sqrt(2)."""

TREE = {
    "group": [0, 0, 0, 0],
    "mask": mask_of((3, 3, 2, 1), 3),
    "tokens": [[5, 6, 7], [5, 6, 8], [5, 9, -1], [4, -1, -1]],
    "rewards": [1.0, 0.0, 0.0, 1.0],
    "old": log([[0.5, 0.5, 0.5], [0.5, 0.5, 0.5], [0.5, 0.5], [0.25]]),
    "old_collision": [[0.5, 0.5, 0.5], [0.5, 0.5, 0.5], [0.5, 0.5, 0.0], [0.625, 0.0, 0.0]],
    "segments": [
        {"values": [0.75], "ends": [0]},
        {"values": [0.25], "ends": [1]},
        {"values": [], "ends": []},
        {"values": [], "ends": []},
    ],
}
"""Four completions that share beginnings: 5 6 7, 5 6 8, 5 9, 4."""

CRITIC = {
    "group": [0],
    "mask": [[1, 1, 0, 1]],
    "rewards": [1.0],
    "values": [[0.5, 0.6, 0.9, 0.8]],
    "new_values": [[0.9, 0.5, 0.0, 0.7]],
    "returns": [[1.0, 1.0, 0.0, 1.0]],
}
"""One completion whose third token was inserted by a tool."""

BATCH = {
    "group": [0, 0, 1, 1, 2, 2],
    "mask": mask_of((1, 3, 2, 2, 1, 1), 3),
    "rewards": [1.0, 0.0, 3.0, 1.0, 2.0, 2.0],
}
"""Three groups, the last one tied: centred (.5, -.5), (1, -1), (0, 0); ten tokens."""

PAIRS = {
    "chosen": [-1.0, -2.0],
    "rejected": [-3.0, -2.0],
    "ref_chosen": [-2.0, -2.0],
    "ref_rejected": [-2.0, -3.0],
    "chosen_lengths": [2, 4],
    "rejected_lengths": [3, 2],
    "log_ratio": [1.0, -0.5],
    "desirable": [True, False],
    "reference_point": 0.25,
    "chosen_scores": [2.0, 0.0],
    "rejected_scores": [1.0, 1.0],
}
"""Margins 2 and -1."""


def drawn(rewards: Sequence[Sequence[float]], lengths: Sequence[int], seed: int) -> dict[str, Any]:
    """A step of an algorithm: log-probs of two decimals, far enough apart that every clip acts."""
    rng = np.random.default_rng(seed)
    width = max(lengths)
    mask = np.array(mask_of(lengths, width))
    normal = lambda: rng.normal(size=mask.shape)
    old = -np.exp(0.7 * normal() - 0.3)
    far = {"old": old, "new": np.minimum(old + 0.5 * normal(), -0.01), "ref": old + 0.5 * normal()}
    far["sampler"] = np.minimum(old + 0.3 * normal(), -0.01)
    flat = [reward for own in rewards for reward in own]
    style = [round(float(x), 1) for x in rng.random(len(flat))]
    return {
        "group": [g for g, own in enumerate(rewards) for _ in own],
        "mask": mask.tolist(),
        "rewards": flat,
        "components": [flat, style],
        "weights": [1.0, 1.0],
        "greedy_reward": 0.4,
        "max_tokens": 9,
        **{name: (values.round(2) * mask).tolist() for name, values in far.items()},
    }


EVEN = drawn(((1.0, 0.0, 0.0, 0.5), (1.0, 1.0, 0.0, 0.2)), (5, 3, 4, 2, 4, 1, 5, 3), 11)
RAGGED = drawn(((1.0, 0.0, 0.0, 0.5), (0.7,), (1.0, 1.0, 0.0)), (5, 3, 4, 2, 4, 1, 5, 3), 12)
UNTRAINED = {**EVEN, "mask": [[0] * 5 if i == 4 else row for i, row in enumerate(EVEN["mask"])]}
"""EVEN, with a completion that is masked."""

INPUTS: Mapping[str, Mapping[str, Any]] = {
    "tokens": TOKENS,
    "one_group": ONE_GROUP,
    "lone": LONE,
    "tied": TIED,
    "steps": STEPS,
    "tree": TREE,
    "critic": CRITIC,
    "batch": BATCH,
    "pairs": PAIRS,
    "even": EVEN,
    "ragged": RAGGED,
    "untrained": UNTRAINED,
}
