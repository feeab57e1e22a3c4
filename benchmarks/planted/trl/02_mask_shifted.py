# MISTAKE: the completion mask is shifted by one as if it belonged to labels, so the first token is never trained and one pad is. EXPECT: the mask does not start at the first completion token / covers a pad after EOS.
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny import *  # noqa: F403 - tiny model, tokenizer, rows of sums, closeness reward, small settings
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from covey.audit.writers.trl import record_run

import torch.nn.functional as F


class Shifted(GRPOTrainer):
    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        # "position t predicts t + 1"
        batch["completion_mask"] = F.pad(batch["completion_mask"], (1, 0))[:, :-1]
        batch["num_items_in_batch"] = batch["completion_mask"].sum()
        return batch


trainer = Shifted(
    model=model(),
    processing_class=tokenizer(),
    reward_funcs=closeness,
    args=GRPOConfig(**settings("02_mask_shifted")),
    train_dataset=Dataset.from_list(sums()),
)
record_run(trainer, out(__file__))
trainer.train()
