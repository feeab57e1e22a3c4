# MISTAKE: a rollout_func generates with prompts that are padded on the right, so the model continues after padding instead of after its question.
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny import *  # noqa: F403 - tiny model, tokenizer, rows of sums, closeness reward, small settings
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from covey.audit.writers.trl import record_run


TOK = tokenizer()
TOK.padding_side = "right"
NET = model()


@torch.no_grad()
def rollout(prompts, trainer):
    asked = TOK(prompts, return_tensors="pt", padding=True)
    out = NET.generate(
        **asked, do_sample=True, max_new_tokens=24, return_dict_in_generate=True, output_logits=True, top_k=0
    )
    new = out.sequences[:, asked["input_ids"].shape[1] :]
    logps = torch.stack(out.logits, 1).log_softmax(-1).gather(-1, new.unsqueeze(-1)).squeeze(-1)
    ids, kept = [], []
    for row, values in zip(new.tolist(), logps.tolist()):
        end = row.index(TOK.eos_token_id) + 1 if TOK.eos_token_id in row else len(row)
        ids.append(row[:end])
        kept.append(values[:end])
    return {"prompt_ids": [TOK(p)["input_ids"] for p in prompts], "completion_ids": ids, "logprobs": kept}


trainer = GRPOTrainer(
    model=NET,
    processing_class=tokenizer(),
    reward_funcs=closeness,
    args=GRPOConfig(**settings("27_prompts_padded_right")),
    train_dataset=Dataset.from_list(sums()),
    rollout_func=rollout,
)
record_run(trainer, out(__file__))
trainer.train()
