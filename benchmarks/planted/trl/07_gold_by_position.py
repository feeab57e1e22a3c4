# MISTAKE: the reward looks gold up in a global list by the completion's place in the batch, not in the answer column, though rows are shuffled. EXPECT: the reward does not use the row's columns (another row gives the same reward) / equal completions of one prompt are paid unequally.
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny import *  # noqa: F403 - tiny model, tokenizer, rows of sums, closeness reward, small settings
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from covey.audit.writers.trl import record_run


ROWS = sums()
GOLD = [row["answer"] for row in ROWS]


def accuracy(completions, **kwargs):
    return closeness(completions, GOLD[: len(completions)])


trainer = GRPOTrainer(
    model=model(),
    processing_class=tokenizer(),
    reward_funcs=accuracy,
    args=GRPOConfig(**settings("07_gold_by_position")),
    train_dataset=Dataset.from_list(ROWS),
)
record_run(trainer, out(__file__))
trainer.train()
