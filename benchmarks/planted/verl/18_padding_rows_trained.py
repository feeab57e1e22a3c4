"""MISTAKE: the batch is padded with copies of its first rows for the workers' number, and the copies are trained as rows of their own."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from verl_loop import *  # noqa: F403 - the trainer, verl's functions, the tiny model


class Forked(Trainer):
    def score_and_weigh(self, batch):
        """Pad to a multiple of 16, as pad_dataproto_to_divisor does, and forget to unpad."""
        missing = -len(batch) % 16
        return super().score_and_weigh(DataProto.concat([batch, batch[:missing]]))


settings = {
    "data.train_batch_size": 3,
    "actor_rollout_ref.rollout.n": 8,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 16,
}
run(Forked(**settings), __file__)
