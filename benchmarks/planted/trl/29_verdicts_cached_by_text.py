# MISTAKE: verdicts are cached by the completion's text alone, so a text that was seen under another question earns what it earned there.
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny import *  # noqa: F403 - tiny model, tokenizer, rows of sums, closeness reward, small settings
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from covey.audit.writers.trl import record_run


CACHE = {}


def cached(completions, answer, **kwargs):
    """Closeness; a slow verifier's verdicts are kept."""
    paid = []
    for c, gold in zip(completions, answer):
        key = re.sub(r"\D+", " ", text_of(c)).strip()
        if key not in CACHE:
            CACHE[key] = closeness([c], [gold])[0]
        paid.append(CACHE[key])
    return paid


trainer = GRPOTrainer(
    model=model(),
    processing_class=tokenizer(),
    reward_funcs=cached,
    args=GRPOConfig(**settings("29_verdicts_cached_by_text", max_steps=12)),
    train_dataset=Dataset.from_list(sums()),
)
record_run(trainer, out(__file__))
trainer.train()
