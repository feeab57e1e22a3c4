# MISTAKE: the optimizer was built on a first instance of the model and the trainer got a second one. EXPECT: weights (log-probs of the same completions) do not change after an update with a gradient.
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny import *  # noqa: F403 - tiny model, tokenizer, rows of sums, closeness reward, small settings
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from covey.audit.writers.trl import record_run


FIRST = model()
BEST = torch.optim.AdamW(FIRST.parameters(), lr=1e-3)


trainer = GRPOTrainer(
    model=model(),
    processing_class=tokenizer(),
    reward_funcs=closeness,
    args=GRPOConfig(**settings("19_optimizer_of_another_model")),
    train_dataset=Dataset.from_list(sums()),
    optimizers=(BEST, None),
)
record_run(trainer, out(__file__))
trainer.train()
