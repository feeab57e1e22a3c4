"""MISTAKE: the shortcut for one minibatch is taken although there are four minibatches and two epochs, so the ratio is always 1 and nothing is ever clipped."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from verl_loop import *  # noqa: F403 - the trainer, verl's functions, the tiny model


class Forked(Trainer):
    def loss(self, micro, on_policy):
        return super().loss(micro, on_policy=True)


settings = {"actor_rollout_ref.actor.ppo_mini_batch_size": 1, "actor_rollout_ref.actor.ppo_epochs": 2}
run(Forked(**settings, actor_rollout_ref__actor__optim__lr=3e-3), __file__)
