# SOUND: only the fifth of the tokens with the highest entropy is trained, at temperature 0.8 with an entropy bonus, weight decay and a cosine rate. EXPECT: no mistake.
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny import *  # noqa: F403 - tiny model, tokenizer, rows of sums, closeness reward, small settings
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from covey.audit.writers.trl import record_run


trainer = GRPOTrainer(
    model=model(),
    processing_class=tokenizer(),
    reward_funcs=closeness,
    args=GRPOConfig(**settings("12_entropy_quantile", top_entropy_quantile=0.2, temperature=0.8, lr_scheduler_type="cosine", warmup_steps=2, weight_decay=0.1, entropy_coef=0.001)),
    train_dataset=Dataset.from_list(sums()),
)
record_run(trainer, out(__file__))
trainer.train()
