"""MISTAKE: the reference worker has no temperature in its config, so its log-probs are at 1 where the policy samples at 0.6."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from verl_loop import *  # noqa: F403 - the trainer, verl's functions, the tiny model


class Forked(Trainer):
    def compute_log_prob(self, net, batch):
        usual = self.rollout.temperature
        self.rollout.temperature = 1.0 if net is self.ref else usual
        found = super().compute_log_prob(net, batch)
        self.rollout.temperature = usual
        return found


settings = {"actor_rollout_ref.rollout.temperature": 0.6, "actor_rollout_ref.actor.use_kl_loss": True}
run(Forked(**settings, actor_rollout_ref__actor__kl_loss_coef=0.05), __file__)
