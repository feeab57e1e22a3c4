"""MISTAKE: old log-probs are computed in micro-batches sorted by length and are not put back into the batch's order."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from verl_loop import *  # noqa: F403 - the trainer, verl's functions, the tiny model


class Forked(Trainer):
    def _compute_old_log_prob(self, batch):
        lengths = batch.batch["attention_mask"].sum(dim=-1)
        balanced = batch[lengths.argsort(descending=True)]
        return super()._compute_old_log_prob(balanced)


settings = {"actor_rollout_ref.actor.ppo_mini_batch_size": 2, "actor_rollout_ref.actor.use_dynamic_bsz": True}
run(Forked(**settings), __file__)
