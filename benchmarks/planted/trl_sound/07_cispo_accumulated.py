# SOUND: CISPO with a high cap, micro-batches of 4 with 4 accumulation steps, two iterations. EXPECT: no mistake.
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
    args=GRPOConfig(**settings("07_cispo_accumulated", loss_type="cispo", epsilon_high=5.0, per_device_train_batch_size=4, gradient_accumulation_steps=4, num_iterations=2, max_steps=10)),
    train_dataset=Dataset.from_list(sums()),
)
record_run(trainer, out(__file__))
trainer.train()
