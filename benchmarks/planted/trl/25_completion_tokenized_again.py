# MISTAKE: a rollout_func decodes the completion, strips it and tokenizes the text again, so trained tokens are not the sampled ones and EOS is lost. EXPECT: no completion ends with EOS though none is at the length limit / tokens disagree with sampler log-probs.
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny import *  # noqa: F403 - tiny model, tokenizer, rows of sums, closeness reward, small settings
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from covey.audit.writers.trl import record_run


def rollout(prompts, trainer):
    tok, net = trainer.processing_class, trainer.accelerator.unwrap_model(trainer.model)
    asked = [tok(p)["input_ids"] for p in prompts]
    sampled, logps = sample(net, tok, asked, 24)
    texts = [tok.decode(ids, skip_special_tokens=True).strip() for ids in sampled]
    ids = [tok(text)["input_ids"] or [tok.eos_token_id] for text in texts]
    logps = [(lp + [0.0] * len(i))[: len(i)] for lp, i in zip(logps, ids)]
    return {"prompt_ids": asked, "completion_ids": ids, "logprobs": logps}


trainer = GRPOTrainer(
    model=model(),
    processing_class=tokenizer(),
    reward_funcs=closeness,
    args=GRPOConfig(**settings("25_completion_tokenized_again")),
    train_dataset=Dataset.from_list(sums()),
    rollout_func=rollout,
)
record_run(trainer, out(__file__))
trainer.train()
