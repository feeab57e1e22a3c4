# MISTAKE: the weights are bfloat16 and the rate is 1e-6, so nearly every update is smaller than half a unit in the last place and is rounded away.
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny import *  # noqa: F403 - tiny model, tokenizer, rows of sums, closeness reward, small settings
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from covey.audit.writers.trl import record_run


trainer = GRPOTrainer(
    model=model(dtype=torch.bfloat16),
    processing_class=tokenizer(),
    reward_funcs=closeness,
    args=GRPOConfig(**settings("31_rounded_away", learning_rate=1e-6)),
    train_dataset=Dataset.from_list(sums()),
)
record_run(trainer, out(__file__))
trainer.train()
