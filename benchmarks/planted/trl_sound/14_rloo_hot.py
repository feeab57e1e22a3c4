# SOUND: RLOO at temperature 1.3, two iterations over each rollout, accumulation over two micro-batches, truncated completions masked.
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny import *  # noqa: F403 - tiny model, tokenizer, rows of sums, closeness reward, small settings
from datasets import Dataset
from trl import RLOOConfig, RLOOTrainer
from covey.audit.writers.trl import record_run


trainer = RLOOTrainer(
    model=model(),
    processing_class=tokenizer(),
    reward_funcs=closeness,
    args=RLOOConfig(
        **settings(
            "14_rloo_hot",
            temperature=1.3,
            num_iterations=2,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            mask_truncated_completions=True,
            beta=0.0,
        )
    ),
    train_dataset=Dataset.from_list(sums()),
)
record_run(trainer, out(__file__))
trainer.train()
