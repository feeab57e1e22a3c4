"""Weights never reach the sampler, which draws from the initial policy (verl-project/verl#7495, huggingface/trl#2856).

Right answer: the sampler's weights are stale.
"""

import copy

from trl import GRPOTrainer
from world import base, grpo, train


class Stale(GRPOTrainer):
    def _generate_single_turn(self, *args, **kwargs):
        live, self.model_wrapped = self.model_wrapped, self.frozen
        try:
            return super()._generate_single_turn(*args, **kwargs)
        finally:
            self.model_wrapped = live


trainer = grpo(Stale)
trainer.frozen = base().eval()
train(trainer)
