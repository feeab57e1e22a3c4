# MISTAKE: an RLOO subclass negates the advantages 'because the loss is minimized', so the worst completions are made likelier. EXPECT: advantages have the opposite sign of reward minus baseline.
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny import *  # noqa: F403 - tiny model, tokenizer, rows of sums, closeness reward, small settings
from datasets import Dataset
from trl import RLOOConfig, RLOOTrainer
from covey.audit.writers.trl import record_run


class Minimized(RLOOTrainer):
    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        batch["advantages"] = -batch["advantages"]  # the optimizer minimizes
        return batch


trainer = Minimized(
    model=model(),
    processing_class=tokenizer(),
    reward_funcs=closeness,
    args=RLOOConfig(**settings("21_rloo_sign", beta=0.0)),
    train_dataset=Dataset.from_list(sums()),
)
record_run(trainer, out(__file__))
trainer.train()
