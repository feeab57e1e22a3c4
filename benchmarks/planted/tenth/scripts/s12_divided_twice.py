"""The token-level loss is divided by the steps of accumulation once more (modelscope/ms-swift#10117).

Right answer: the loss is a quarter of what its normalisation says: divided by gradient_accumulation_steps twice.
"""

from trl import GRPOTrainer
from world import grpo, train


class Twice(GRPOTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return loss / self.current_gradient_accumulation_steps


train(grpo(Twice, per_device_train_batch_size=8, gradient_accumulation_steps=4, loss_type="dapo"))
