# MISTAKE: compute_loss is overridden and divides by gradient_accumulation_steps again, which TRL has done. EXPECT: the loss is 1/4 of what its formula gives for the configured loss type.
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny import *  # noqa: F403 - tiny model, tokenizer, rows of sums, closeness reward, small settings
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from covey.audit.writers.trl import record_run


class Averaged(GRPOTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return loss / self.args.gradient_accumulation_steps


trainer = Averaged(
    model=model(),
    processing_class=tokenizer(),
    reward_funcs=closeness,
    args=GRPOConfig(**settings("26_accumulation_divided_twice", per_device_train_batch_size=4, gradient_accumulation_steps=4)),
    train_dataset=Dataset.from_list(sums()),
)
record_run(trainer, out(__file__))
trainer.train()
