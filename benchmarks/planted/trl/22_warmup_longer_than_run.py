# MISTAKE: warmup_steps was copied from a recipe of 20000 steps, so the rate never leaves 0 in this run of 10. EXPECT: the learning rate is all but 0 / weights do not move.
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
    args=GRPOConfig(**settings("22_warmup_longer_than_run", max_steps=10, learning_rate=1e-5, lr_scheduler_type="cosine", warmup_steps=2000)),
    train_dataset=Dataset.from_list(sums()),
)
record_run(trainer, out(__file__))
trainer.train()
