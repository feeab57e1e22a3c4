"""SOUND: GSPO on LoRA adapters merged into the engine, with a KL loss to the base and a high rate."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from verl_loop import *  # noqa: F403 - the trainer, verl's functions, the tiny model

from peft import LoraConfig, get_peft_model
from verl.workers.config import ActorConfig


class Adapted(Trainer):
    def init_workers(self):
        super().init_workers()
        shape = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        self.net = get_peft_model(self.net, shape)
        trained = [p for p in self.net.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=self.actor.optim.lr)

    def loss_config(self):
        bounds = {"clip_ratio_low": self.actor.clip_ratio_low, "clip_ratio_high": self.actor.clip_ratio_high}
        return ActorConfig(strategy="fsdp", rollout_n=6, use_dynamic_bsz=True, **bounds)

    def update_weights(self):
        merged = copy.deepcopy(self.net).merge_and_unload()
        self.engine.load_state_dict(merged.state_dict())


settings = {
    "actor_rollout_ref.model.lora_rank": 8,
    "actor_rollout_ref.actor.optim.lr": 3e-3,
    "actor_rollout_ref.actor.policy_loss.loss_mode": "gspo",
    "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-mean",
    "actor_rollout_ref.actor.clip_ratio_low": 3e-3,
    "actor_rollout_ref.actor.clip_ratio_high": 4e-3,
    "actor_rollout_ref.actor.use_kl_loss": True,
    "actor_rollout_ref.actor.kl_loss_coef": 0.01,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
}
run(Adapted(**settings), __file__)
