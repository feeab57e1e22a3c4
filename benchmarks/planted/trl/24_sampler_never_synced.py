# MISTAKE: a rollout_func samples from a copy of the model that is never updated. EXPECT: the sampler's log-probs fall behind the policy's more and more (completions are off-policy and not corrected).
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny import *  # noqa: F403 - tiny model, tokenizer, rows of sums, closeness reward, small settings
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from covey.audit.writers.trl import record_run

import copy

NET = model()
SAMPLER = copy.deepcopy(NET)  # the "inference server"


def rollout(prompts, trainer):
    tok = trainer.processing_class
    asked = [tok(p)["input_ids"] for p in prompts]
    ids, logps = sample(SAMPLER, tok, asked, 24)
    return {"prompt_ids": asked, "completion_ids": ids, "logprobs": logps}


trainer = GRPOTrainer(
    model=NET,
    processing_class=tokenizer(),
    reward_funcs=closeness,
    args=GRPOConfig(**settings("24_sampler_never_synced", learning_rate=3e-3, max_steps=12)),
    train_dataset=Dataset.from_list(sums()),
    rollout_func=rollout,
)
record_run(trainer, out(__file__))
trainer.train()
