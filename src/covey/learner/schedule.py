"""The learning rate over a run."""

from __future__ import annotations

import math

from covey.config.schema import Train


def learning_rate(step: int, train: Train) -> float:
    """The learning rate of a step, counted from 0: linear warm-up, then the schedule to the end.

    >>> [learning_rate(s, Train(steps=4, lr=1.0, warmup_steps=2, schedule="linear")) for s in range(4)]
    [0.5, 1.0, 1.0, 0.5]
    """
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    progress = (step - train.warmup_steps) / max(train.steps - train.warmup_steps, 1)
    factors = {
        "constant": 1.0,
        "linear": 1 - progress,
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
    }
    return train.lr * factors[train.schedule]
