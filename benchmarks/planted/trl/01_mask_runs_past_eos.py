# MISTAKE: what follows the first EOS is filled with EOS and the mask is ids != pad, so filler after the end is trained. EXPECT: tokens after the first EOS are in the mask.
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny import *  # noqa: F403 - tiny model, tokenizer, rows of sums, closeness reward, small settings
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from covey.audit.writers.trl import record_run


class Rectangular(GRPOTrainer):
    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        eos, pad = self.processing_class.eos_token_id, self.processing_class.pad_token_id
        ids = batch["completion_ids"].masked_fill(batch["completion_mask"] == 0, eos)  # erase after the first EOS
        batch["completion_ids"] = ids
        batch["completion_mask"] = (ids != pad).long()
        batch["num_items_in_batch"] = batch["completion_mask"].sum()
        return batch


trainer = Rectangular(
    model=model(),
    processing_class=tokenizer(),
    reward_funcs=closeness,
    args=GRPOConfig(**settings("01_mask_runs_past_eos")),
    train_dataset=Dataset.from_list(sums()),
)
record_run(trainer, out(__file__))
trainer.train()
