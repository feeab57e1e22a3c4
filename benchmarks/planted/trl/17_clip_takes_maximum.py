# MISTAKE: an own loss takes the maximum of the clipped and unclipped objective instead of the minimum, with two iterations per batch. EXPECT: the loss is not that of the clipped objective; tokens outside the clip still push / the recorded loss differs from TRL's formula.
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
        old = inputs.get("old_per_token_logps")
        old = logps.detach() if old is None else old
        ratio = torch.exp(logps - old)
        clipped = ratio.clamp(1 - self.epsilon_low, 1 + self.epsilon_high)
        per_token = -torch.max(ratio * advantages, clipped * advantages)
        self._metrics["train"]["entropy"].append(((entropies * mask).sum() / mask.sum()).item())
        return (per_token * mask).sum() / mask.sum().clamp(min=1.0)


trainer = Own(
    model=model(),
    processing_class=tokenizer(),
    reward_funcs=closeness,
    args=GRPOConfig(**settings("17_clip_takes_maximum", loss_type="bnpo", num_iterations=3, learning_rate=4e-3, max_steps=12)),
    train_dataset=Dataset.from_list(sums()),
)
record_run(trainer, out(__file__))
trainer.train()
