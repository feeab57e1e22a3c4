# SOUND: GSPO's sequence ratio with its tiny clip, two iterations and two slices a generation. EXPECT: no mistake.
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny import *  # noqa: F403 - tiny model, tokenizer, rows of sums, closeness reward, small settings
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from covey.audit.writers.trl import record_run


trainer = GRPOTrainer(
    model=model(),
    processing_class=tokenizer(),
    reward_funcs=closeness,
    args=GRPOConfig(**settings("02_gspo_two_iterations", importance_sampling_level="sequence", loss_type="grpo", epsilon=3e-4, epsilon_high=4e-4, num_iterations=2, per_device_train_batch_size=8, steps_per_generation=2, max_steps=12)),
    train_dataset=Dataset.from_list(sums()),
)
record_run(trainer, out(__file__))
trainer.train()
