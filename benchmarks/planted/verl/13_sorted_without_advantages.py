"""MISTAKE: the worker sorts its rows by length before it cuts micro-batches and leaves the advantages where they were."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from verl_loop import *  # noqa: F403 - the trainer, verl's functions, the tiny model


class Forked(Trainer):
    updating = False

    def update_policy(self, batch):
        self.updating = True
        metrics = super().update_policy(batch)
        self.updating = False
        return metrics

    def micro_batches(self, batch):
        if not self.updating:
            return super().micro_batches(batch)
        left = batch.batch["advantages"].clone()
        ordered = batch[batch.batch["attention_mask"].sum(dim=-1).argsort(stable=True)]
        ordered.batch["advantages"] = left * ordered.batch["response_mask"]
        return super().micro_batches(ordered)


run(Forked(), __file__)
