"""SOUND: the batch is padded with copies of its first rows for the workers' number; the copies have mask 0 and advantage 0."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from verl_loop import *  # noqa: F403 - the trainer, verl's functions, the tiny model


class Padded(Trainer):
    def score_and_weigh(self, batch):
        batch = super().score_and_weigh(batch)
        copies = batch[: -len(batch) % 16]
        for name in ("response_mask", "advantages"):
            copies.batch[name] = torch.zeros_like(copies.batch[name])
        return DataProto.concat([batch, copies])


settings = {
    "data.train_batch_size": 3,
    "actor_rollout_ref.rollout.n": 8,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 32,
}
run(Padded(**settings), __file__)
