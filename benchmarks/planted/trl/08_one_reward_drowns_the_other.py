# MISTAKE: a brevity reward in characters (0 to -80) is added to an accuracy reward of 0 to 1 without weights. EXPECT: one reward function makes nearly all of the variance of the sum; accuracy hardly counts.
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny import *  # noqa: F403 - tiny model, tokenizer, rows of sums, closeness reward, small settings
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from covey.audit.writers.trl import record_run


def brevity(completions, **kwargs):
    return [-float(len(text_of(c))) for c in completions]


trainer = GRPOTrainer(
    model=model(),
    processing_class=tokenizer(),
    reward_funcs=[closeness, brevity],
    args=GRPOConfig(**settings("08_one_reward_drowns_the_other")),
    train_dataset=Dataset.from_list(sums()),
)
record_run(trainer, out(__file__))
trainer.train()
