"""SOUND: GSPO on LoRA adapters that are merged before they are sent to the engine, with a high rate."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from openrlhf_loop import *  # noqa: F403 - the trainer, OpenRLHF's functions, the tiny model

from peft import LoraConfig, get_peft_model


class Adapted(Trainer):
    def init_models(self):
        super().init_models()
        self.engine = model()

    def load_policy(self):
        shape = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        return get_peft_model(model(), shape)

    def broadcast_to_vllm(self):
        merged = copy.deepcopy(self.net).merge_and_unload()
        self.engine.load_state_dict(merged.state_dict())


settings = {
    "actor.policy_loss_type": "gspo",
    "actor.eps_clip_low_high": [0.003, 0.004],
    "actor.adam.lr": 3e-3,
    "ds.lora.rank": 8,
    "train.batch_size": 12,
}
run(Adapted(**settings), __file__)
