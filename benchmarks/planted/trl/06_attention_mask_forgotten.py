# MISTAKE: an overridden log-prob method calls the model without the attention mask, so left padding is attended to in a batch of unequal prompts. EXPECT: log-probs depend on padding / differ from a plain forward of each completion alone, only for padded prompts.
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny import *  # noqa: F403 - tiny model, tokenizer, rows of sums, closeness reward, small settings
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from covey.audit.writers.trl import record_run


ROWS = sums()
for k, row in enumerate(ROWS):  # every other prompt is longer
    if k % 2:
        row["prompt"] = "Please answer this with one number and be brief.\n" + row["prompt"]


class Own(GRPOTrainer):
    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, compute_entropy=False, **kwargs
    ):
        logits = model(input_ids=input_ids).logits[:, -logits_to_keep - 1 : -1] / self.temperature
        logps = logits.log_softmax(-1)
        chosen = logps.gather(-1, input_ids[:, -logits_to_keep:].unsqueeze(-1)).squeeze(-1)
        return chosen, -(logps.exp() * logps).sum(-1) if compute_entropy else None, None


trainer = Own(
    model=model(),
    processing_class=tokenizer(),
    reward_funcs=closeness,
    args=GRPOConfig(**settings("06_attention_mask_forgotten")),
    train_dataset=Dataset.from_list(ROWS),
)
record_run(trainer, out(__file__))
trainer.train()
