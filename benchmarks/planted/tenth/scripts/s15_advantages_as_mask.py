"""The loss gets the advantages where it expects the mask of the response (verl-project/verl#2506).

Right answer: the mask in the loss is not the mask of the completion (advantages stand in its place).
"""

from trl import GRPOTrainer
from world import grpo, train


class WrongArgument(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        import torch

        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        advantages = inputs["advantages"][:, None] * inputs["completion_mask"]
        logps, _, _ = self._get_per_token_logps_and_entropies(model, ids, attention, advantages.size(1))
        return self.policy_loss(logps, logps.detach(), advantages, response_mask=advantages)

    def policy_loss(self, logps, old, advantages, response_mask):
        ratio = (logps - old).exp()
        per_token = -(ratio * advantages).minimum(ratio.clamp(0.8, 1.2) * advantages)
        return (per_token * response_mask).sum() / (response_mask.sum() + 1e-8)


train(grpo(WrongArgument, learning_rate=1e-4))
