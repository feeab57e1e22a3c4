# SOUND: a data set of four problems seen at every step, a moving reference, negative rewards, batch std, warm-up and cosine.
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny import *  # noqa: F403 - tiny model, tokenizer, rows of sums, closeness reward, small settings
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from covey.audit.writers.trl import record_run


def penalty(completions, answer, **kwargs):
    """0 for the right number, below 0 for another, -5 without one."""
    numbers = [number(text_of(c)) for c in completions]
    return [
        -5.0 if n is None or len(n) > 6 else -min(abs(int(n) - int(gold)), 4) / 1.0
        for n, gold in zip(numbers, answer)
    ]


trainer = GRPOTrainer(
    model=model(),
    processing_class=tokenizer(),
    reward_funcs=penalty,
    args=GRPOConfig(
        **settings(
            "15_four_problems",
            scale_rewards="batch",
            lr_scheduler_type="cosine",
            warmup_steps=2,
            max_steps=10,
            beta=0.02,
            sync_ref_model=True,
            ref_model_sync_steps=3,
        )
    ),
    train_dataset=Dataset.from_list(sums(4)),
)
record_run(trainer, out(__file__))
trainer.train()
