# MISTAKE: to save memory the reference model is the policy itself, so the KL penalty of beta 0.1 compares the policy with itself. EXPECT: reference log-probs always equal the policy's while it is trained; KL does nothing.
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
    args=GRPOConfig(**settings("18_reference_is_the_policy", beta=0.1, learning_rate=3e-3)),
    train_dataset=Dataset.from_list(sums()),
)
trainer.ref_model = trainer.accelerator.unwrap_model(trainer.model)  # no second copy in memory
record_run(trainer, out(__file__))
trainer.train()
