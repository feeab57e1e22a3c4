# MISTAKE: the reward divides by the best score of the batch it is called with and subtracts the batch's mean before GRPO does its own. EXPECT: the reward of a completion depends on the others in the call (alone it is another).
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny import *  # noqa: F403 - tiny model, tokenizer, rows of sums, closeness reward, small settings
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from covey.audit.writers.trl import record_run


def normalized(completions, answer, **kwargs):
    raw = closeness(completions, answer)
    mean, best = sum(raw) / len(raw), max(raw) or 1.0
    return [(r - mean) / best for r in raw]


trainer = GRPOTrainer(
    model=model(),
    processing_class=tokenizer(),
    reward_funcs=normalized,
    args=GRPOConfig(**settings("09_reward_relative_to_batch")),
    train_dataset=Dataset.from_list(sums()),
)
record_run(trainer, out(__file__))
trainer.train()
