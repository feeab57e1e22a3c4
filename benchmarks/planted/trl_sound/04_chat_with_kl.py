# SOUND: a conversational data set with a system message, KL to a reference that is synced every 4 steps. EXPECT: no mistake.
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
    args=GRPOConfig(**settings("04_chat_with_kl", beta=0.04, sync_ref_model=True, ref_model_sync_steps=4, ref_model_mixup_alpha=0.5, max_steps=10)),
    train_dataset=Dataset.from_list(chat(sums(), "You add numbers.")),
)
record_run(trainer, out(__file__))
trainer.train()
