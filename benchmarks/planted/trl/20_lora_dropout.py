# MISTAKE: LoRA with dropout 0.3 stays on while log-probs are computed, so old and new log-probs are of different random networks. EXPECT: log-probs used in training are noisy / differ from a plain forward pass of the same weights; ratios are not 1 before any update.
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
    args=GRPOConfig(**settings("20_lora_dropout", learning_rate=2e-3, num_iterations=2, max_steps=12)),
    train_dataset=Dataset.from_list(sums()),
    peft_config=LoraConfig(r=16, lora_alpha=32, lora_dropout=0.3, target_modules="all-linear", task_type="CAUSAL_LM"),
)
record_run(trainer, out(__file__))
trainer.train()
