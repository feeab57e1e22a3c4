# MISTAKE: the evaluation rows were taken with select() and not taken out of the training rows. EXPECT: evaluation prompts are among the trained ones.
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny import *  # noqa: F403 - tiny model, tokenizer, rows of sums, closeness reward, small settings
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from covey.audit.writers.trl import record_run


ROWS = sums(32)


trainer = GRPOTrainer(
    model=model(),
    processing_class=tokenizer(),
    reward_funcs=closeness,
    args=GRPOConfig(**settings("23_eval_rows_are_trained", max_steps=12, eval_strategy="steps", eval_steps=4, per_device_eval_batch_size=16)),
    train_dataset=Dataset.from_list(ROWS),
    eval_dataset=Dataset.from_list(ROWS[:8]),
)
record_run(trainer, out(__file__))
trainer.train()
