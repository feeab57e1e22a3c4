# MISTAKE: RLOO's advantages are divided by the std of the other completions, which is nearly zero where they all earned the same, so single advantages are in the thousands.
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny import *  # noqa: F403 - tiny model, tokenizer, rows of sums, closeness reward, small settings
from datasets import Dataset
from trl import RLOOConfig, RLOOTrainer
from covey.audit.writers.trl import record_run


def near(completions, answer, **kwargs):
    """1 for a number not far from the right one, else 0."""
    return [float(value > 0.3) for value in closeness(completions, answer)]


class Normalized(RLOOTrainer):
    def _calculate_rewards(self, *args, **kwargs):
        self.paid = super()._calculate_rewards(*args, **kwargs)
        return self.paid

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        groups = self.paid.sum(1).view(-1, self.num_generations)
        columns = range(self.num_generations)
        rest = torch.stack([groups[:, [k for k in columns if k != j]] for j in columns], 1)
        batch["advantages"] = ((groups - rest.mean(-1)) / (rest.std(-1) + 1e-4)).view(-1)
        return batch


trainer = Normalized(
    model=model(),
    processing_class=tokenizer(),
    reward_funcs=near,
    args=RLOOConfig(**settings("30_left_out_std")),
    train_dataset=Dataset.from_list(sums()),
)
record_run(trainer, out(__file__))
trainer.train()
