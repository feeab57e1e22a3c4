"""The number of rows of an iterator that a run reads: from its start, as many as the steps can take."""

from __future__ import annotations

import math
from collections.abc import Iterable

from covey.config.methods import COMPARING_METHODS, METHODS
from covey.config.python_objects import MAX_STREAMED, RowsObject
from covey.config.schema import Config


def read_streams(stages: Iterable[Config]) -> list[str]:
    """Read the iterators of a run's stages as far as the steps can take rows, and return notes.

    Raises ConfigError for more rows than are kept.
    """
    counts = dict[RowsObject, int]()
    for config in stages:
        data = config.data
        for table, count in ((data.train, rows_of_run(config)), (data.test, data.test_size)):
            if isinstance(table, RowsObject) and table.stream is not None:
                counts[table] = max(counts.get(table, 0), count)
    return [
        f"{table.key}: the run reads the first {count:,} rows of the iterator, which is as many as it can use"
        for table, count in counts.items()
        if table.read(count)
    ]


def rows_of_run(config: Config) -> int:
    """Return how many rows the steps of a run can take without taking one twice."""
    method = METHODS[config.method]
    if method.loop is None:  # it selects among all rows
        return MAX_STREAMED + 1
    if method.samples:
        # A filter may drop every group of every round.
        rounds = 1 + config.rollout.max_resampling_rounds
        return config.train.steps * config.rollout.prompts_per_step * rounds
    rows = config.train.steps * config.train.batch_size
    held_out = config.data.held_out if config.method in COMPARING_METHODS and config.data.test is None else 0
    return math.ceil(rows / (1 - held_out))
