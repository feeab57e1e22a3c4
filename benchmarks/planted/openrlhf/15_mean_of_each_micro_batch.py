"""MISTAKE: the loss is not given the counts of the whole batch, so each micro-batch has its own mean and short ones count more."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from openrlhf_loop import *  # noqa: F403 - the trainer, OpenRLHF's functions, the tiny model


class Forked(Trainer):
    def training_step(self, experience, info):
        return super().training_step(experience, {})


run(Forked(train__micro_batch_size=4), __file__)
