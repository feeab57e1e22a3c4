# MISTAKE: a careless merge left each prompt twice, the second time with the next row's answer. EXPECT: the same prompt occurs with different answers.
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny import *  # noqa: F403 - tiny model, tokenizer, rows of sums, closeness reward, small settings
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from covey.audit.writers.trl import record_run


ROWS = sums(24)
MERGED = ROWS + [{**row, "answer": ROWS[(k + 1) % len(ROWS)]["answer"]} for k, row in enumerate(ROWS)]


trainer = GRPOTrainer(
    model=model(),
    processing_class=tokenizer(),
    reward_funcs=closeness,
    args=GRPOConfig(**settings("11_conflicting_gold", max_steps=12)),
    train_dataset=Dataset.from_list(MERGED),
)
record_run(trainer, out(__file__))
trainer.train()
