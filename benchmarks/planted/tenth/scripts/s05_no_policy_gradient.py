"""The importance ratio is built from detached log-probs, so only the KL term trains (mlx-lm-lora#55).

Right answer: the policy loss has no gradient; rewards do not reach the weights.
"""

import torch
from trl import GRPOTrainer
from world import grpo, train


class Detached(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        mask = inputs["completion_mask"]
        logps, _, _ = self._get_per_token_logps_and_entropies(model, ids, attention, mask.size(1))
        ratio = torch.exp(logps - logps).detach()
        ref = inputs["ref_per_token_logps"]
        kl = torch.exp(ref - logps) - (ref - logps) - 1
        per_token = -ratio * inputs["advantages"][:, None] + self.beta * kl
        self._metrics["train"]["kl"].append((kl * mask).sum().item() / mask.sum().item())
        return ((per_token * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()


train(grpo(Detached, beta=0.04, loss_type="grpo"))
