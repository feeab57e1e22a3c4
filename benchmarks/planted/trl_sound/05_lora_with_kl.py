# SOUND: a fresh LoRA adapter without dropout, KL to the base with adapters disabled, a high rate as usual for LoRA. EXPECT: no mistake.
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny import *  # noqa: F403 - tiny model, tokenizer, rows of sums, closeness reward, small settings
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from covey.audit.writers.trl import record_run

from peft import LoraConfig


trainer = GRPOTrainer(
    model=model(),
    processing_class=tokenizer(),
    reward_funcs=closeness,
    args=GRPOConfig(**settings("05_lora_with_kl", beta=0.02, learning_rate=3e-3)),
    train_dataset=Dataset.from_list(sums()),
    peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
)
record_run(trainer, out(__file__))
trainer.train()
