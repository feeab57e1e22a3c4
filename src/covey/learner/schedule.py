"""The learning-rate schedule of a run."""

from __future__ import annotations

import math

from covey.config.schema import Train


def learning_rate(step: int, train: Train, number: int = 0) -> float:
    """Return the learning rate of a step's optimizer step ``number``, both counted from 0.

    The warm-up rises with every step; after it the schedule falls with every optimizer step.

    >>> [learning_rate(s, Train(steps=4, lr=1.0, warmup_steps=2, schedule="linear")) for s in range(4)]
    [0.5, 1.0, 1.0, 0.5]
    >>> [learning_rate(1, Train(steps=2, lr=1.0, updates_per_batch=2, schedule="linear"), n) for n in (0, 1)]
    [0.5, 0.25]
    >>> [learning_rate(s, Train(steps=2, lr=1.0, schedule={"cosine": 0.5})) for s in (0, 1, 2)]
    [1.0, 0.75, 0.5]
    """
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    # In steps, the fraction of the present one included.
    position = step + number / train.updates_per_rollout_batch
    progress = (position - train.warmup_steps) / max(train.steps - train.warmup_steps, 1)
    factors = {
        "constant": 1.0,
        "linear": 1 - progress,
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
    }
    ends_at = train.schedule if isinstance(train.schedule, dict) else {train.schedule: 0.0}
    ((name, floor),) = ends_at.items()
    return train.lr * (floor + (1 - floor) * factors[name])
