# SOUND: a strict reward that is mostly 0 and rows sorted from easy to hard without shuffling. EXPECT: no mistake (many groups without a signal are worth a note at most).
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny import *  # noqa: F403 - tiny model, tokenizer, rows of sums, closeness reward, small settings
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from covey.audit.writers.trl import record_run


ROWS = sorted(sums(), key=lambda row: int(row["answer"]))


def strict(completions, answer, **kwargs):
    near = closeness(completions, answer)
    return [float(n >= 0.4 and "plus" in text_of(c) and text_of(c).endswith(".")) for n, c in zip(near, completions)]


trainer = GRPOTrainer(
    model=model(),
    processing_class=tokenizer(),
    reward_funcs=strict,
    args=GRPOConfig(**settings("09_sparse_and_sorted", shuffle_dataset=False, max_steps=12, num_generations=8)),
    train_dataset=Dataset.from_list(ROWS),
)
record_run(trainer, out(__file__))
trainer.train()
