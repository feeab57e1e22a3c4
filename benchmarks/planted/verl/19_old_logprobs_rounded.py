"""MISTAKE: old log-probs are computed under bfloat16 autocast and rounded, the trained ones in float32, so ratios differ from 1 before the first update and tokens are clipped by noise."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from verl_loop import *  # noqa: F403 - the trainer, verl's functions, the tiny model


class Forked(Trainer):
    def compute_log_prob(self, net, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().compute_log_prob(net, batch).bfloat16().float()


settings = {"actor_rollout_ref.actor.ppo_epochs": 2}
run(Forked(**settings), __file__)
