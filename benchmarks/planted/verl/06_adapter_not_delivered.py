"""MISTAKE: with LoRA the weight synchronisation sends the base weights only, so the engine samples from the initial policy all along."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from verl_loop import *  # noqa: F403 - the trainer, verl's functions, the tiny model

from peft import LoraConfig, get_peft_model


class Forked(Trainer):
    def init_workers(self):
        super().init_workers()
        shape = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        self.net = get_peft_model(self.net, shape)
        trained = [p for p in self.net.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=self.actor.optim.lr)

    def update_weights(self):
        sent = self.net.get_base_model().state_dict()
        own = {name.replace(".base_layer", ""): value for name, value in sent.items() if "lora_" not in name}
        self.engine.load_state_dict(own)


settings = {"actor_rollout_ref.model.lora_rank": 8, "actor_rollout_ref.actor.optim.lr": 1e-2}
run(Forked(**settings, actor_rollout_ref__rollout__calculate_log_probs=True), __file__)
