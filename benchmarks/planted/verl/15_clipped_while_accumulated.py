"""MISTAKE: a fork clips the gradient after each micro-batch, so the sum so far is cut again and again and the last micro-batch counts most."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from verl_loop import *  # noqa: F403 - the trainer, verl's functions, the tiny model


class Forked(Trainer):
    def loss(self, micro, on_policy):
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.actor.grad_clip)
        return super().loss(micro, on_policy)


run(Forked(actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu=4, actor_rollout_ref__actor__grad_clip=0.1), __file__)
