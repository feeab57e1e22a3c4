# MISTAKE: a wrong number costs 1 and what cannot be parsed earns 0 from an except branch, so an answer without a number is better than a wrong one.
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny import *  # noqa: F403 - tiny model, tokenizer, rows of sums, closeness reward, small settings
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from covey.audit.writers.trl import record_run


def verdict(completions, answer, **kwargs):
    """1 for the number, -1 for another one."""
    paid = []
    for c, gold in zip(completions, answer):
        try:
            right = int(re.search(r"<answer>(\d+)</answer>", text_of(c)).group(1)) == int(gold)
            paid.append(1.0 if right else -1.0)
        except Exception:
            paid.append(0.0)
    return paid


trainer = GRPOTrainer(
    model=model(),
    processing_class=tokenizer(),
    reward_funcs=verdict,
    args=GRPOConfig(**settings("32_silence_is_excused", per_device_train_batch_size=32, num_generations=8)),
    train_dataset=Dataset.from_list(sums()),
)
record_run(trainer, out(__file__))
trainer.train()
