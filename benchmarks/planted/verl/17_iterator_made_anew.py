"""MISTAKE: each step takes next(iter(dataloader)), so all steps train on the first batch of a data set of 32 rows."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from verl_loop import *  # noqa: F403 - the trainer, verl's functions, the tiny model


class Forked(Trainer):
    def next_rows(self):
        count = self.config.data.train_batch_size
        return next(iter([self.rows[i : i + count] for i in range(0, len(self.rows), count)]))


run(Forked(trainer__total_training_steps=8), __file__)
