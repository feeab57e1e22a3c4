# MISTAKE: the train sampler was overridden by a plain RandomSampler, so each group of 4 holds 4 different prompts. EXPECT: a group's completions have different prompts.
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny import *  # noqa: F403 - tiny model, tokenizer, rows of sums, closeness reward, small settings
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from covey.audit.writers.trl import record_run

from torch.utils.data import RandomSampler


class Shuffled(GRPOTrainer):
    def _get_train_sampler(self, dataset=None):
        return RandomSampler(dataset if dataset is not None else self.train_dataset)


trainer = Shuffled(
    model=model(),
    processing_class=tokenizer(),
    reward_funcs=closeness,
    args=GRPOConfig(**settings("14_groups_mix_prompts")),
    train_dataset=Dataset.from_list(sums()),
)
record_run(trainer, out(__file__))
trainer.train()
