# SOUND: own log-prob and loss methods that do the same as TRL's, at temperature 0.7, two iterations. EXPECT: no mistake.
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny import *  # noqa: F403 - tiny model, tokenizer, rows of sums, closeness reward, small settings
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from covey.audit.writers.trl import record_run


class Own(GRPOTrainer):
    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, compute_entropy=False, **kwargs
    ):
        logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, -logits_to_keep - 1 : -1] / self.temperature
        logps = logits.log_softmax(-1)
        chosen = logps.gather(-1, input_ids[:, -logits_to_keep:].unsqueeze(-1)).squeeze(-1)
        return chosen, -(logps.exp() * logps).sum(-1) if compute_entropy else None, None

    def _compute_loss(self, model, inputs):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        seen = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        mask = inputs["completion_mask"]
        logps, entropies, _ = self._get_per_token_logps_and_entropies(
            model, ids, seen, mask.size(1), compute_entropy=True
        )
        advantages = inputs["advantages"].unsqueeze(1)
        old = inputs.get("old_per_token_logps")
        old = logps.detach() if old is None else old
        ratio = torch.exp(logps - old)
        clipped = ratio.clamp(1 - self.epsilon_low, 1 + self.epsilon_high)
        per_token = -torch.min(ratio * advantages, clipped * advantages)
        self._metrics["train"]["entropy"].append(((entropies * mask).sum() / mask.sum()).item())
        return (per_token * mask).sum() / mask.sum().clamp(min=1.0)


trainer = Own(
    model=model(),
    processing_class=tokenizer(),
    reward_funcs=closeness,
    args=GRPOConfig(**settings("10_own_but_right", loss_type="bnpo", temperature=0.7, num_iterations=2, max_steps=10)),
    train_dataset=Dataset.from_list(sums()),
)
record_run(trainer, out(__file__))
trainer.train()
