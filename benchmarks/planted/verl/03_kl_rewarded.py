"""MISTAKE: a fork's own KL in the reward is added, so leaving the reference is rewarded."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from verl_loop import *  # noqa: F403 - the trainer, verl's functions, the tiny model


class Forked(Trainer):
    def apply_kl(self, batch):
        kld = kl_penalty(batch.batch["old_log_probs"], batch.batch["ref_log_prob"], "kl")
        kld = kld * batch.batch["response_mask"]
        batch.batch["token_level_rewards"] = batch.batch["token_level_scores"] + self.kl_ctrl.value * kld
        return batch


settings = {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.05}
run(Forked(**settings, actor_rollout_ref__actor__optim__lr=3e-3), __file__)
