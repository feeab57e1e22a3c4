"""MISTAKE: a fork forgot zero_grad, so each optimizer step repeats the gradients of all steps before it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from verl_loop import *  # noqa: F403 - the trainer, verl's functions, the tiny model


class Forked(Trainer):
    def zero_grad(self):
        pass


settings = {"actor_rollout_ref.actor.ppo_mini_batch_size": 2, "actor_rollout_ref.actor.grad_clip": 100.0}
run(Forked(**settings), __file__)
