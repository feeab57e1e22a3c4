# MISTAKE: the batch is sorted by length for cheaper padding and the advantages are not, so completions are trained with their neighbours' advantages. EXPECT: advantages do not fit the rewards of their completions.
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny import *  # noqa: F403 - tiny model, tokenizer, rows of sums, closeness reward, small settings
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from covey.audit.writers.trl import record_run


class Bucketed(GRPOTrainer):
    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        order = batch["completion_mask"].sum(1).argsort(descending=True)
        for key in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"):
            batch[key] = batch[key][order]
        return batch


trainer = Bucketed(
    model=model(),
    processing_class=tokenizer(),
    reward_funcs=closeness,
    args=GRPOConfig(**settings("15_advantages_left_behind")),
    train_dataset=Dataset.from_list(sums()),
)
record_run(trainer, out(__file__))
trainer.train()
