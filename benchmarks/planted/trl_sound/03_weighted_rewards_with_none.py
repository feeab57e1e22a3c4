# SOUND: three reward functions with weights, one of which returns None for rows of another kind; rewards scaled by the batch. EXPECT: no mistake.
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny import *  # noqa: F403 - tiny model, tokenizer, rows of sums, closeness reward, small settings
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from covey.audit.writers.trl import record_run


ROWS = sums()
for k, row in enumerate(ROWS):
    row["kind"] = "tagged" if k % 3 == 0 else "plain"
    if row["kind"] == "tagged":
        row["prompt"] = "Use tags.\n" + row["prompt"]


def tags(completions, kind, **kwargs):
    return [
        None if k != "tagged" else float("<answer>" in text_of(c)) + 0.5 * float("</answer>" in text_of(c))
        for c, k in zip(completions, kind)
    ]


def concise(completions, **kwargs):
    return [1.0 - min(len(text_of(c)), 40) / 40 for c in completions]


trainer = GRPOTrainer(
    model=model(),
    processing_class=tokenizer(),
    reward_funcs=[closeness, tags, concise],
    args=GRPOConfig(**settings("03_weighted_rewards_with_none", reward_weights=[1.0, 0.5, 0.1], scale_rewards="batch")),
    train_dataset=Dataset.from_list(ROWS),
)
record_run(trainer, out(__file__))
trainer.train()
