"""Advantages divide by the deviation of the other completions, which is 0 if one alone differs (NVIDIA-NeMo/RL#1518).

Right answer: advantages explode (1e5 and more), because they are divided by a deviation of zero.
"""

from trl import GRPOTrainer
from world import grpo, train


class LeaveOneOut(GRPOTrainer):
    def _calculate_rewards(self, *args):
        self.raw = super()._calculate_rewards(*args)
        return self.raw

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        grouped = self.raw.sum(1).view(-1, self.num_generations)
        count = self.num_generations - 1
        mean = (grouped.sum(1, keepdim=True) - grouped) / count
        square = ((grouped**2).sum(1, keepdim=True) - grouped**2) / count
        std = (square - mean**2).clamp(min=0).sqrt()
        output["advantages"] = ((grouped - mean) / (std + 1e-6)).flatten()
        return output


train(grpo(LeaveOneOut))
