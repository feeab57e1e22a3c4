# MISTAKE: an own loss takes the current log-probs as old ones without detach, so the ratio is a constant 1 and nothing is learned. EXPECT: the gradient is 0 / weights do not move although advantages differ.
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny import *  # noqa: F403 - tiny model, tokenizer, rows of sums, closeness reward, small settings
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from covey.audit.writers.trl import record_run


class Own(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        seen = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        mask = inputs["completion_mask"]
        logps, entropies, _ = self._get_per_token_logps_and_entropies(
            model, ids, seen, mask.size(1), compute_entropy=True
        )
        advantages = inputs["advantages"].unsqueeze(1)
        old = inputs.get("old_per_token_logps", logps)
        ratio = torch.exp(logps - old)
        clipped = ratio.clamp(1 - self.epsilon_low, 1 + self.epsilon_high)
        per_token = -torch.min(ratio * advantages, clipped * advantages)
        self._metrics["train"]["entropy"].append(((entropies * mask).sum() / mask.sum()).item())
        return (per_token * mask).sum() / mask.sum().clamp(min=1.0)


trainer = Own(
    model=model(),
    processing_class=tokenizer(),
    reward_funcs=closeness,
    args=GRPOConfig(**settings("16_ratio_not_detached", loss_type="bnpo")),
    train_dataset=Dataset.from_list(sums()),
)
record_run(trainer, out(__file__))
trainer.train()
