"""The KL term is subtracted from the loss that is minimised (verl a65c9157, Unakar/Logic-RL#58, qiancheng0/ToolRL#52).

Right answer: the sign of the KL term in the loss is wrong; the policy is pushed away from the reference.
"""

from trl import GRPOTrainer
from world import grpo, train


class Maximized(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        coefficient, self.beta = self.beta, -self.beta
        loss = super()._compute_loss(model, inputs)
        self.beta = coefficient
        return loss


train(grpo(Maximized, beta=0.04))
