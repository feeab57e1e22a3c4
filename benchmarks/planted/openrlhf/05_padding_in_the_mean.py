"""MISTAKE: a fork's normalization of advantages takes its mean and deviation over all positions, padding included."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from openrlhf_loop import *  # noqa: F403 - the trainer, OpenRLHF's functions, the tiny model


class Maker(RemoteExperienceMaker):
    def compute_advantages_and_returns(self, experiences):
        experiences = super().compute_advantages_and_returns(experiences)
        everything = torch.cat([e.advantages.flatten() for e in experiences])
        for experience in experiences:
            experience.advantages = (experience.advantages - everything.mean()) / (everything.std() + 1e-8)
        return experiences


class Forked(Trainer):
    def make_maker(self):
        return Maker


run(Forked(algo__advantage__estimator="dr_grpo", rollout__micro_batch_size=24), __file__)
