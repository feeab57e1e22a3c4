# SOUND: RLOO with KL in the reward and normalized advantages. EXPECT: no mistake.
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny import *  # noqa: F403 - tiny model, tokenizer, rows of sums, closeness reward, small settings
from datasets import Dataset
from trl import RLOOConfig, RLOOTrainer
from covey.audit.writers.trl import record_run


trainer = RLOOTrainer(
    model=model(),
    processing_class=tokenizer(),
    reward_funcs=closeness,
    args=RLOOConfig(**settings("11_rloo", beta=0.05, normalize_advantages=True)),
    train_dataset=Dataset.from_list(sums()),
)
record_run(trainer, out(__file__))
trainer.train()
