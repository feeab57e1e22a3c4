# MISTAKE: rows without an answer were filled with '' and the reward is `gold in text`, so these rows pay for anything. EXPECT: an empty completion is paid on some rows; groups whose gold is empty all get 1.
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny import *  # noqa: F403 - tiny model, tokenizer, rows of sums, closeness reward, small settings
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from covey.audit.writers.trl import record_run


ROWS = sums()
for k, row in enumerate(ROWS):
    # the word that the answer must have; missing in the source for two rows of five
    row["word"] = "" if k % 5 < 2 else ("is", "plus", "and")[k % 3]  # df.fillna("")


def contains_word(completions, word, **kwargs):
    return [1.0 if w in text_of(c) else 0.0 for c, w in zip(completions, word)]


trainer = GRPOTrainer(
    model=model(),
    processing_class=tokenizer(),
    reward_funcs=contains_word,
    args=GRPOConfig(**settings("10_empty_gold")),
    train_dataset=Dataset.from_list(ROWS),
)
record_run(trainer, out(__file__))
trainer.train()
